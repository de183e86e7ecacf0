"""The pages of docs/: their code runs, and the reference names everything that is public."""

import pathlib
import re
import types

import jax_ep

REPOSITORY = pathlib.Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"


def test_the_api_pages_name_everything_public():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: jax_ep\.(?:\w+\.)?(\w+)$", text, re.MULTILINE)
    documented += re.findall(r"`jax_ep\.(\w+_NAME)`", text)
    assert len(documented) == len(set(documented))
    public = {
        name
        for name, value in vars(jax_ep).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(documented) == public
