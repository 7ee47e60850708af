"""What is written in the README and on the pages of docs/, as blocks of code."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Their programs are run by tests of their own: test_errors_page_faults.py and
#: test_joining_faults.py of tests/runtime.
ELSEWHERE = {"errors.md", "joining-jobs.md"}
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ELSEWHERE),
    *sorted((ROOT / "docs/ports").glob("*.md")),
    ROOT / "scripts/examples/README.md",
]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and where it stands."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_program(self) -> bool:
        return self.language == "python" and "import" in self.text


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\S*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: m.start()].count("\n") + 1, m[1], m[2]) for m in found]


def programs() -> list[tuple[Block, str | None]]:
    """Every program, with what it prints where that is shown behind it, or behind its command."""
    found = []
    for page in PAGES:
        rest = [each for each in blocks(page) if each.language in {"python", "text", "console"}]
        for number, each in enumerate(rest):
            if each.is_program:
                after = [b for b in rest[number + 1 : number + 3] if b.language != "console"]
                shown = after[0].text if after and after[0].language == "text" else None
                found.append((each, shown))
    return found


def commands() -> dict[str, list[Block]]:
    """Every command behind a `$`, without its comment, and the blocks that have it."""
    found: dict[str, list[Block]] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                for line in block.text.splitlines():
                    command = line.removeprefix("$ ").partition("  #")[0].strip()
                    found.setdefault(command, []).append(block)
    return found
