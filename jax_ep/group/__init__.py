"""EPGroup, and ep_init, which opens one on the transport that it selects."""

from jax_ep.group.ep_group import EPGroup as EPGroup
from jax_ep.group.ep_group import calls_of as calls_of
from jax_ep.group.ep_group import check_group as check_group
from jax_ep.group.ep_group import check_is_group as check_is_group
from jax_ep.group.ep_group import ep_init as ep_init
