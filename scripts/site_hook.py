"""MkDocs hook: pages and links that lie outside of docs/ work on the site as they do on GitHub.

The pages and notebooks of OUTSIDE become pages of the site. A file or folder of the repository that a page links to,
such as ../wbmm/ops/reference.py, becomes a page that shows it, so that the site needs no address of a repository.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# In the repository and on the site; docs/X is X there.
OUTSIDE = {path: path for path in ("CONTRIBUTING.md", "CHANGELOG.md", "wbmm/ops/README.md")}
for folder, ending in (("models", "*.md"), ("notebooks", "*.md"), ("notebooks", "*.ipynb")):
    OUTSIDE |= {f"{folder}/{path.name}": f"{folder}/{path.stem}.md" for path in (ROOT / folder).glob(ending)}
OUTSIDE["SECURITY.md"] = "policy.md"  # security.md is the page in docs/
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")
NAMED = re.compile(r"\[([\w/]+\.md)\]\(([\w./-]+\.md)(?=[)#])")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def repository_path(site_path: str) -> str:
    outside = {on_site: path for path, on_site in OUTSIDE.items()}
    return outside.get(site_path, f"docs/{site_path}")


def resolve(page: str, link: str) -> str | None:
    """The path in the repository that `link` on the page at `page` leads to, or None if there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if (ROOT / path).exists() else None


def site_path(path: str) -> str:
    """Where the file or folder `path` of the repository is on the site."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    inside = path.removeprefix("docs/")
    if (ROOT / path).is_file() and (inside != path or not shown(path)):
        return inside
    return f"{inside}/README.md" if (ROOT / path / "README.md").is_file() else f"{inside}.md"


def shown(path: str) -> bool:
    """Whether a file is shown as text; others, such as weights, are there to download."""
    return (ROOT / path).suffix in (*LANGUAGES, ".md", ".txt", "")


def show(path: str) -> str:
    """A page with the text of a file, or the names in a folder."""
    head = f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n# {path}\n\n"
    source = ROOT / path
    if source.is_dir():
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in source.iterdir())
        return head + "".join(f"- `{name}`\n" for name in names if not name.startswith(("__", ".")))
    text = source.read_text(encoding="utf-8")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{head}{fence}{LANGUAGES.get(source.suffix, 'text')}\n{text}{fence}\n"


def show_notebook(text: str) -> str:
    """A notebook as a page: its text, code and stored outputs. Nothing is run."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output](data:image/png;base64,{''.join(data['image/png'].split())})")
            elif lines := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{''.join(lines).rstrip()}\n```")
    return "\n\n".join(parts)


def on_files(files: Files, config) -> Files:
    for path, on_site in OUTSIDE.items():
        content = (ROOT / path).read_text(encoding="utf-8")
        content = show_notebook(content) if path.endswith(".ipynb") else content
        files.append(File.generated(config, on_site, content=content))
    pages = [file for file in files if file.is_documentation_page() and file.src_uri.endswith(".md")]
    for page in pages:
        here = repository_path(page.src_uri)
        for link in LINK.findall(page.content_string):
            path = resolve(here, link)
            if path and not files.get_file_from_path(site_path(path)):
                source = {"content": show(path)} if shown(path) else {"abs_src_path": str(ROOT / path)}
                files.append(File.generated(config, site_path(path), **source))
    return files


def title(path: str, otherwise: str) -> str:
    """The heading of a page of the repository."""
    found = re.search("^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else otherwise


def on_page_markdown(markdown: str, page, **_) -> str:
    here = repository_path(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match) -> str:
        path = resolve(here, match[1])
        return posixpath.relpath(site_path(path), folder or ".") if path else match[1]

    def name(match: re.Match) -> str:  # [data.md](data.md): readers of the site know pages, not files
        path = resolve(here, match[2])
        return f"[{title(path, match[1]) if path else match[1]}]({match[2]}"

    return LINK.sub(rewrite, NAMED.sub(name, markdown))
