#!/bin/sh
# Writes the locks anew from pyproject.toml and the .in files. Pins stay where they still fit: `lock.sh --upgrade` lifts
# them, `lock.sh --upgrade-package NAME` lifts one. Needs the folder with the engine's torch, as sync.sh does.
#
# The engine comes first and the others are bound to its versions, so that installing the engine over base, or base over
# the installer, changes no pin. For Python 3.11 on Linux: that is what vLLM's CPU build and its torch are made for.
set -eu
cd "$(dirname "$0")/.."

export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
links=""
for folder in ${PIP_FIND_LINKS:-$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)}; do
    links="$links --find-links $folder"
done
roles=""
for extra in s3 gcs azure hf fsspec ray flows serve sign dev; do roles="$roles --extra $extra"; done

# The output names neither the registry nor the command, which would name this machine's folders.
compile() {
    .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform linux --generate-hashes \
        --no-header --no-emit-index-url --no-emit-find-links "$@"
}

# shellcheck disable=SC2086  # lists of options, split on purpose
{
    compile "$@" $links $roles --override requirements/overrides.txt \
        pyproject.toml requirements/engine.in --output-file requirements/engine.txt
    compile "$@" $roles --constraint requirements/engine.txt \
        pyproject.toml requirements/base.in --output-file requirements/base.txt
    compile "$@" --constraint requirements/engine.txt requirements/uv.in --output-file requirements/uv.txt
}
