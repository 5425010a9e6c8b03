#!/bin/sh
# Brings .venv in line with a lock and puts this project, editable, on top.
#
#   requirements/sync.sh base       everything but the engine, and nothing else
#   requirements/sync.sh engine     everything
#   requirements/sync.sh project    only the project: its metadata changed, the locks did not
#
# uv does not read pip's configuration, so what says where wheels come from is handed over here: `index-url` for a
# mirror, and `find-links` for the engine's torch, from the environment or else from pip's own files.
set -eu
cd "$(dirname "$0")/.."
lock=$1
python=.venv/bin/python

pip_setting() { "$python" -m pip config get "global.$1" 2>/dev/null || true; }

# A machine may trust a certificate authority that uv does not ship.
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"

if [ "$lock" != project ]; then
    if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
        index=${PIP_INDEX_URL:-$(pip_setting index-url)}
        if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
    fi
    set -- --quiet --python "$python"
    if [ "$lock" = engine ]; then
        for folder in ${PIP_FIND_LINKS:-$(pip_setting find-links)}; do set -- "$@" --find-links "$folder"; done
    fi
    .venv/bin/uv pip sync "$@" --require-hashes "requirements/$lock.txt"
fi
.venv/bin/uv pip install --quiet --python "$python" --offline --no-deps --no-build-isolation --editable .
