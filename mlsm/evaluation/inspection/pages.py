"""The command docs: read the installed pages of docs/, so that pages cited in messages can be read anywhere.

    list_or_read(DocsConfig(page="corpora"))    # {"page": "corpora", "title": "Corpora", "file": ".../corpora.md"}
    text_of("tutorials/own-corpus")             # a notebook as Markdown: its text, code and output

The pages are in docs/ of a checkout and, by the link mlsm/pages, in every wheel. Not handled here: the website made
from them (mkdocs.yml), printing (mlsm/commands/docs.py).
"""

import base64
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import Positional, check

PAGES = Path(__file__).resolve().parents[2] / "pages"


@dataclass(frozen=True, kw_only=True)
class DocsConfig:
    """Print a page of the documentation, or list all pages. They come with the program: no network is needed."""

    page: Positional[str | None] = None
    """The page's name, as messages and the list give it, such as corpora. Without one: the list."""

    def __post_init__(self):
        check(self)


def list_or_read(settings: DocsConfig) -> dict:
    """Find a page.

    Returns  page (its name), title and file; without a name `pages`, a list of such dicts
    Raises   ValueError if there is no page of that name; the message lists similar names
    """
    files = {
        file.relative_to(PAGES).with_suffix("").as_posix(): file
        for pattern in ("*.md", "tutorials/*.ipynb")
        for file in sorted(PAGES.glob(pattern))
    }
    pages = [{"page": name, "title": title_of(name), "file": str(file.resolve())} for name, file in files.items()]
    if settings.page is None:
        return {"pages": pages}
    wanted = settings.page.removeprefix("docs/").removesuffix(".md").removesuffix(".ipynb").lower()
    for page in pages:
        if page["page"].lower() in (wanted, f"tutorials/{wanted}"):
            return page
    near = difflib.get_close_matches(wanted, files, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"no page {settings.page!r}.{meant} There are: {', '.join(files)}")


def text_of(name: str, figures: Callable[[bytes], str] | None = None) -> str:
    """The text of a page as Markdown.

    figures  called with the PNG of each figure in a notebook's output, returns its address; without it figures are
             omitted
    """
    page = PAGES / f"{name}.md"
    if page.is_file():
        return page.read_text(encoding="utf-8")
    notebook = json.loads((PAGES / f"{name}.ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", ()):
            if "image/png" not in output.get("data", {}):
                shown = "".join(output["text"] if "text" in output else output["data"]["text/plain"])
                parts.append(f"```text\n{shown.rstrip()}\n```")
            elif figures is not None:
                parts.append(f"![Figure]({figures(base64.b64decode(output['data']['image/png']))})")
    return "\n\n".join(parts) + "\n"


def title_of(name: str) -> str:
    """The heading of a page."""
    return text_of(name).partition("\n")[0].removeprefix("# ")
