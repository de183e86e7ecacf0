#!/usr/bin/env bash
# Commits the documentation of a release to the branch gh-pages, beside that of earlier ones.
#
# Usage: tools/deploy_docs.sh TAG        after `make docs`
#
# Pushes nothing: `.venv-docs/bin/mike serve` shows the branch of this clone.
#
# Environment variables:
#   DOCS_URL  where the site will be; pages then link to themselves there (mkdocs.yml)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv-docs/bin:$PATH NO_MKDOCS_2_WARNING=1
tag=$1

read -ra tags <<< "$(git tag --list 'v*' | tr '\n' ' ')"
read -ra arguments <<< "$(python3 tools/release.py docs "$tag" "${tags[@]}")"
mike deploy --update-aliases "${arguments[@]}"
# The site's first page leads to the newest release, even before there is one.
mike set-default --allow-undefined latest
