#!/usr/bin/env bash
# Builds the documentation site into site/; a broken link, a missing anchor or a page outside the navigation is an error.
#   bash scripts/docs.sh            builds it
#   bash scripts/docs.sh --serve    shows it on http://127.0.0.1:8000 and again after every change
# $DOCS_PYTHON names an interpreter that has the packages of drafttrain[docs]; otherwise they go into .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${DOCS_PYTHON:-}" ]; then
  source scripts/env.sh
  install_drafttrain "[docs]"
  DOCS_PYTHON=python
fi
export NO_MKDOCS_2_WARNING=true
case "${1:-}" in
  "") "$DOCS_PYTHON" -m mkdocs build --strict --site-dir site 2>&1 | sed '/^INFO/d' && echo "wrote site/; open site/index.html" ;;
  --serve) exec "$DOCS_PYTHON" -m mkdocs serve --strict --livereload ;;
  *) echo "error: unknown option $1 (known: --serve)" >&2; exit 2 ;;
esac
