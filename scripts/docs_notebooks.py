"""For mkdocs: a page NAME.md for each notebook NAME.ipynb of the documentation, with its cells and their text outputs."""

from __future__ import annotations

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def page(notebook: Path) -> str:
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output.get("data", {}).get("text/plain") or ""
            if shown and output.get("name") != "stderr":
                parts.append("```text\n" + "".join(shown).rstrip() + "\n```")
    parts.insert(1, f"This page is a notebook: [download it]({notebook.name}) and run it.")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, name, content=page(Path(str(notebook.abs_src_path)))))
    return files
