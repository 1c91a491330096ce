"""Draws which folder of the package imports which: `python tests/house.py` prints the picture.

A folder stands one floor above the highest that it imports. CONTRIBUTING.md shows the picture, and
a test keeps it equal to the code.
"""

from __future__ import annotations

import sys

from tests.test_layers import MODULES, ORDER, own_imports_of


def imports() -> dict[str, set[str]]:
    """Return folder -> the folders that it imports."""
    found: dict[str, set[str]] = {folder: set() for folder in ORDER}
    for module in MODULES:
        folder = module.partition(".")[0]
        if folder in found:
            found[folder] |= {name.partition(".")[0] for name in own_imports_of(module)}
    return {folder: names & set(ORDER) - {folder} for folder, names in found.items()}


def floors() -> list[list[str]]:
    """Return the folders of each floor, the ground floor first."""
    below, height = imports(), dict[str, int]()
    for folder in ORDER:
        height[folder] = 1 + max((height[name] for name in below[folder]), default=-1)
    return [[f for f in ORDER if height[f] == floor] for floor in range(max(height.values()) + 1)]


def picture() -> str:
    """Draw the floors from the top down, and beside each folder what it imports.

    What a folder imports through another that it imports is left out.
    """
    below, lines = imports(), []

    def reach(folder: str) -> set[str]:
        return below[folder].union(*(reach(name) for name in below[folder]))

    width = max(len(folder) for folder in ORDER)
    for number, folders in reversed(list(enumerate(floors()))):
        for place, folder in enumerate(folders):
            through = set[str]().union(*(reach(name) for name in below[folder]))
            direct = [name for name in ORDER if name in below[folder] - through]
            floor = f"{number}" if place == 0 else " "
            arrow = f" --> {', '.join(direct)}" if direct else ""
            lines.append(f"{floor:>2} [ {folder:{width}} ]{arrow}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(picture() + "\n")
