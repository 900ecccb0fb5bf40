"""Hooks of mkdocs: pages of the repository outside `docs/`, and the links of Hugging Face docstrings."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Files of the repository that are part of the site, under the same path.
PATTERNS = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "recipes/*.md",
    "recipes/*/*.md",
    "recipes/*/*.yaml",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
)
TRANSFORMERS = "https://huggingface.co/docs/transformers/main/en/main_classes/"
TRANSFORMERS_PAGES = {"TrainingArguments": "trainer", "Trainer": "trainer"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of `PATTERNS` to the site."""
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in PATTERNS for path in root.glob(pattern)):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Translates links between `docs/` and the rest of the repository to paths of the site."""
    if page.file.generated_by:
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    return re.sub(r"\]\(\.\./", "](", markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Renders the types of parameters, and makes links of references such as [`~transformers.Trainer`]."""

    def link(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2]
        if name in TRANSFORMERS_PAGES:
            url = f"{TRANSFORMERS}{TRANSFORMERS_PAGES[name]}#transformers.{name}"
        elif f'id="hf_xmc.{name}"' in html:
            url = f"#hf_xmc.{name}"
        else:
            return f"<code>{name}</code>"
        return f'<a href="{url}"><code>{name}</code></a>'

    html = re.sub(r"\(<code>([^<]*`[^<]*)</code>", _type, html)
    return re.sub(r"\[<code>~?([\w.]+)</code>\](?!\()", link, html)


def _type(match: re.Match[str]) -> str:
    """Removes the markup of a type in a docstring: [`XMCTrainer`] or `str`, *optional*, defaults to `"x"`."""
    text = re.sub(r"\[`~?([\w.]+)`\]", r"\1", match[1])
    text = re.sub(r",? defaults to .*", "", text)
    return f"(<code>{text.replace('`', '').replace('*', '')}</code>"
