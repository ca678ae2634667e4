"""Import every module of the installed graphport and compare the list with the checkout's files.

In: the checkout's package folder. Out: exit status 0, or 1 with what is missing, foreign or does not import. Run it
with `python -I` in an environment that has the wheel and not the checkout.
"""

import importlib
import sys
from pathlib import Path


def module_names(package: Path) -> set[str]:
    """Dotted names of all modules below `package`, the linked folders included."""
    files = [*package.glob("*.py"), *package.glob("*/*.py")]
    parts = [("graphport", *file.relative_to(package).with_suffix("").parts) for file in files]
    return {".".join(names[:-1] if names[-1] == "__init__" else names) for names in parts}


def main() -> int:
    """`import_every_module.py CHECKOUT_PACKAGE`."""
    checkout = Path(sys.argv[1]).resolve()
    installed = Path(importlib.import_module("graphport").__file__ or "").parent
    problems = []
    if installed == checkout or not (installed / "py.typed").is_file():
        problems.append(f"graphport was imported from {installed}: the checkout itself, or a wheel without py.typed")
    expected = module_names(checkout)
    problems += [f"{name} is not in the wheel" for name in sorted(expected - module_names(installed))]
    problems += [f"{name} is not in the checkout" for name in sorted(module_names(installed) - expected)]
    for name in sorted(module_names(installed)):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module raises at import is the finding
            problems.append(f"{name} does not import: {type(error).__name__}: {error}")
    for problem in problems:
        print(f"wheel: {problem}", file=sys.stderr)
    print(f"imported {len(expected)} modules from {installed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
