"""The model catalogue: writes the deployments of every model in `models/` into `prefect.yaml`.

    python deployments/catalogue.py            after a change in models/ or per-model.yaml
    python deployments/catalogue.py --check    only say whether prefect.yaml is current

`prefect deploy` reads one file and cannot look into a folder. So what is above the line `_BELOW` in `prefect.yaml` is
written by hand, and what is below it comes from `per-model.yaml`, once for each SPEC in `models/`.
"""

# ruff: noqa: T201 (it talks on the terminal)
from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from llm_prefetch.errors import PrefetchError, SpecError
from llm_prefetch.spec import load_spec

FOLDER = Path(__file__).parent
COMMAND = "python deployments/catalogue.py"
_BELOW = f"  # --- written by `{COMMAND}` from models/ and per-model.yaml; edit those ---\n"


def main(argv: list[str] | None = None, folder: Path = FOLDER) -> int:
    """Write the file, or check it; the exit code of the command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    check = parser.parse_args(argv).check
    target = folder / "prefect.yaml"
    try:
        wanted = render(folder)
    except PrefetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if target.read_text("utf-8") == wanted:
        return 0
    if check:
        print(f"{target} is not what models/ and per-model.yaml say; run: {COMMAND}", file=sys.stderr)
        return 1
    fresh = target.with_suffix(".new")
    fresh.write_text(wanted, "utf-8")
    fresh.replace(target)  # at once, so that nobody deploys half a file
    print(f"wrote {target}")
    return 0


def render(folder: Path = FOLDER) -> str:
    """What `prefect.yaml` in this folder should be.

    Raises:
        SpecError: a model's file is no valid SPEC, is not named as its deployment, or there is none; or
            `prefect.yaml` has no place for them.
    """
    files = sorted((folder / "models").glob("*.yaml"))
    if not files:
        raise SpecError("no model", where=str(folder / "models"), hint="put one SPEC there for each model")
    by_hand, below, _ = (folder / "prefect.yaml").read_text("utf-8").partition(_BELOW)
    if not below:
        where = str(folder / "prefect.yaml")
        raise SpecError("the line above the models is gone", where=where, hint=f"end it with {_BELOW!r}")
    _, _, template = (folder / "per-model.yaml").read_text("utf-8").partition("\n  - ")
    return by_hand + _BELOW + "\n".join(_deployments(file, f"  - {template}") for file in files)


def _deployments(file: Path, template: str) -> str:
    """The template, filled in for one model."""
    model = load_spec(str(file)).deployment
    if model != file.stem:
        raise SpecError(
            f"the file is named {file.stem}, its deployment {model}",
            where=str(file),
            hint="name both alike: the deployments of a model are found by its name",
        )
    spec = "".join(
        line for line in file.read_text("utf-8").splitlines(keepends=True) if not line.startswith("#")
    )
    # An anchor may hold no dot.
    text = re.sub(r"([&*])MODEL\b", lambda found: found[1] + re.sub(r"[^\w-]", "_", model), template)
    text = text.replace("MODEL", model)
    return re.sub(r"(?m)^( *)SPEC\n", lambda found: textwrap.indent(spec, found[1]), text)


if __name__ == "__main__":
    sys.exit(main())
