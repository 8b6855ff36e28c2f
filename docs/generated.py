"""What `make docs` adds to the pages of this folder: a page for every command, the Python API, the file formats, and
the tutorials as pages (hooks of mkdocs.yml).

All of it is generated from one source. Commands come from the files of mlsm/commands/ with the docstrings under their
settings, laid out by the parser that prints --help; the API from the public names of `mlsm`, by mkdocstrings; the
formats from the docstrings of the modules that write them; the tutorials from their notebooks. So a new command, name
or notebook appears by itself. The command `mlsm docs` reads pages without the site.
"""

import re
import sys
import textwrap
from pathlib import Path

import griffe
from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlsm  # noqa: E402
from mlsm.cli.help import COMMON, RECIPES, flags_of  # noqa: E402
from mlsm.commands import Command, load, names  # noqa: E402
from mlsm.common.settings import flag_of, settable  # noqa: E402
from mlsm.evaluation.inspection.pages import text_of, title_of  # noqa: E402
from mlsm.recipes.reading import read_recipe, recipe_settings  # noqa: E402

COMMANDS = {name: f"reference/{name}.md" for name in sorted(names())}
TUTORIALS = sorted(f"tutorials/{path.stem}" for path in (ROOT / "docs" / "tutorials").glob("*.ipynb"))
TUTORIALS.sort(key=lambda name: name != "tutorials/own-corpus")  # the first to read
FORMATS = {
    "Stores and shards": "shards.schema",
    "Dictionaries": "pipeline.dictionary.atoms",
    "Runs": "student.runs.directory",
    "Checkpoints of a run": "student.runs.checkpoint",
    "Records of evaluations": "mlsm.evaluation.records",
}


def on_config(config):
    """Give the pages that are made here places in the navigation, and headings the anchors that GitHub makes."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    sections = {name: pages for section in config.nav for name, pages in section.items()}
    sections["Tutorials"] += [{title_of(name): f"{name}.md"} for name in TUTORIALS]
    commands = [{name: page} for name, page in COMMANDS.items()]
    sections["Reference"] += [{"All flags": commands}, {"Python API": "reference/python.md"}]
    sections["Reference"] += [{"File formats": "reference/formats.md"}]
    return config


def on_files(files, config):
    """Add the pages."""
    texts = {page: command_page(load(name)) for name, page in COMMANDS.items()}
    texts |= {"reference/python.md": api_page(), "reference/formats.md": formats_page()}
    pictures: dict[str, bytes] = {}
    texts |= {f"{name}.md": tutorial_page(name, pictures) for name in TUTORIALS}
    for page, content in (texts | pictures).items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let the table of commands lead to the pages of their flags, and links to notebooks to the pages made of them."""
    if page.file.src_uri == "commands.md":
        markdown = re.sub(r"^\| (`([a-z-]+)\b[^`]*`)", r"| [\1](reference/\2.md)", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\((tutorials/[\w-]+)\.ipynb\)", r"](\1.md)", markdown)


def command_page(command: Command):
    """Describe one command: what --help says, with the values that recipes give."""
    name, settings = command.name, command.settings
    parser = flags_of(command, {}, "")
    formatter, fields = parser._get_formatter(), settable(settings)
    recipes = dict(_recipes_with(name, settings)) if command.recipes else {}
    lines = [f"# {name}", "", (parser.description or "").partition("\n")[0], "", f"    {parser.usage}", ""]
    lines += [as_markdown(settings.__doc__), ""]
    for group in parser._action_groups:
        lines += [f"## {group.title}", ""] * bool(group._group_actions)
        for action in group._group_actions:
            shown = formatter._format_action_invocation(action)
            anchor = flag_of(fields[action.dest]).lstrip("-").lower()
            lines += [f"### `{shown}` {{ #{anchor} data-toc-label='{shown.split()[0].rstrip(',')}' }}", ""]
            lines += [as_markdown((action.help or "").replace("%%", "%")), ""]
            given = {recipe: values[action.dest] for recipe, values in recipes.items() if action.dest in values}
            values = ", ".join(f"`{_plain(value)}` in {recipe}" for recipe, value in given.items())
            lines += [f"*Recipes:* {values}.", ""] * bool(values)
    generic = (RECIPES + "\n" if command.recipes else "") + COMMON
    return "\n".join([*lines, "## Common options", "", "```", generic, "```", ""])


def _recipes_with(name, settings):
    """The recipes that say something of a command, with the values that they give its settings."""
    for path in sorted((ROOT / "mlsm" / "recipes").glob("*.yaml")):
        recipe = path.stem.replace("_", "-")
        sections = read_recipe(recipe)[1]
        if name in sections and "study" not in sections:
            yield recipe, recipe_settings(recipe, name, settings, True)


def _plain(value):
    """Write a value as the flag takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def api_page():
    """Name every public object for mkdocstrings, under the name by which users import it."""
    lines = ["# Python API", "", "How they are used together: [From Python](../python.md).", ""]
    lines += ["## Commands as functions", "", "Their keyword arguments are the flags of the command.", ""]
    for name in mlsm.COMMANDS:
        page = name.replace("_", "-")
        lines += [_object(f"mlsm.{name}", f"mlsm.{name}")]
        lines += [f"Settings: [{page}]({page}.md). Result: its report, and the fields of its class below.", ""]
    lines += ["## Objects", ""]
    objects = {name: _object(f"{home}.{name}", f"mlsm.{name}") for name, home in mlsm.HOME.items()}
    lines += [text for name, text in objects.items() if mlsm.HOME[name] != "mlsm.results"]
    lines += ["## What functions return", ""]
    lines += [text for name, text in objects.items() if mlsm.HOME[name] == "mlsm.results"]
    return "\n".join(lines)


def formats_page():
    """Show the docstrings of the modules that write files."""
    lines = ["# File formats", "", "As the modules that write them say. The words: [glossary](../glossary.md).", ""]
    for title, module in FORMATS.items():
        docstring = griffe.load(module, search_paths=[str(ROOT)]).docstring
        assert docstring is not None  # ruff wants one of every module
        lines += [f"## {title}", "", as_markdown(docstring.value), "", f"*From `{module}`.*", ""]
    return "\n".join(lines)


def tutorial_page(name, pictures):
    """Show a notebook as a page, with the way to the file; its figures are added to `pictures` by their addresses."""
    stem = name.rpartition("/")[2]

    def keep(picture):
        pictures[f"{name}-{len(pictures)}.png"] = picture
        return f"{stem}-{len(pictures) - 1}.png"

    title, _, text = text_of(name, keep).partition("\n")
    text = re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text)
    return f"{title}\n\n*This page is a notebook: [{stem}.ipynb]({stem}.ipynb).*\n{text}"


def _object(path, heading):
    return f"::: {path}\n    options:\n      heading: {heading}\n      toc_label: {heading}\n"


def as_markdown(docstring):
    """Turn a docstring into Markdown: paragraphs with columns or code stay as laid out, the others flow."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip("\n")):
        has_columns = re.search(r"\S {2,}\S", paragraph) or all(line.startswith("  ") for line in paragraph.split("\n"))
        if has_columns:
            paragraphs.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            outside_code = re.compile(r"[<*](?=(?:[^`]*`[^`]*`)*[^`]*$)")  # an even number of backticks follows
            paragraphs.append(outside_code.sub(lambda found: {"<": "&lt;", "*": r"\*"}[found[0]], paragraph))
    return "\n\n".join(paragraphs)


class Docstrings(griffe.Extension):
    """Docstrings of the API page as Markdown."""

    def on_instance(self, *, obj, **_):
        """Convert the docstring of an object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
