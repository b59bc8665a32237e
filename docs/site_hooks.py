"""What the site shows from outside of docs/: README, CONTRIBUTING, changes and the licence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "LICENSE": "license.txt",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them, with links that hold where they stand on the site."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for target, place in PAGES.items():
            text = text.replace(f"]({target})", f"]({place})")
        files.append(File.generated(config, name, content=text))
    return files
