"""The corpus: which Debian packages it comes from, and how each is read as clean paragraphs.

Every reader takes the folder into which one package was unpacked and yields `Document`s. A paragraph is one line of
text; hard line breaks of the source are gone, and typographic quotes and dashes are ASCII.
"""

import gzip
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """One chapter or article, in order of reading; `manner` ends the sentence "Write in the manner of ..."."""

    title: str
    paragraphs: list[str]
    manner: str
    definition_of: str | None = None
    held_out: bool = False


Reader = Callable[[Path], Iterator[Document]]


@dataclass(frozen=True)
class Source:
    """One Debian package and the work taken from it; `licence` is that of the text, not of the package's software."""

    package: str
    work: str
    licence: str
    read: Reader = field(repr=False)


ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "--",
        "\u2013": "-",
        "\u2026": "...",
        "\ufeff": "",
    }
)


def clean(text: str) -> str:
    """One paragraph on one line: single spaces, ASCII quotes and dashes, no _emphasis_ marks."""
    text = re.sub(r"(?<!\w)_([^_]+)_(?!\w)", r"\1", text.translate(ASCII))
    return re.sub(r"\s+", " ", text).strip()


def is_prose(paragraph: str) -> bool:
    """False for tables, rulers, contents pages and the like: prose is mostly lower-case letters and spaces."""
    return bool(paragraph) and sum(c.islower() or c == " " for c in paragraph) >= 0.7 * len(paragraph)


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of plain text in which blank lines part them."""
    return [paragraph for block in re.split(r"\n\s*\n", text) if is_prose(paragraph := clean(block))]


def chapters_of(
    text: str, heading: str, manner: str, held_out: Callable[[str], bool] = lambda title: False
) -> Iterator[Document]:
    """Cut a book at the lines that match `heading`; what stands before the first of them (title page) is dropped."""
    starts = [*re.finditer(heading, text, re.MULTILINE)]
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=True):
        title = clean(start.group())
        body = paragraphs_of(text[start.end() : end])
        if sum(map(len, body)) > 500:  # shorter "chapters" are lines of a table of contents
            yield Document(title, body, manner, held_out=held_out(title))


def gutenberg(name: str, heading: str, manner: str, held_out: Callable[[str], bool] = lambda title: False) -> Reader:
    """A reader for the one plain-text book `name` of a package, without the distributor's header and footer."""

    def read(folder: Path) -> Iterator[Document]:
        text = next(folder.rglob(name)).read_text("utf-8").replace("\r", "")
        text = re.split(r"^\*\*\* ?START OF.*$", text, flags=re.MULTILINE)[-1]
        text = re.split(r"^(?:\*\*\* ?)?End of (?:the )?Project", text, flags=re.MULTILINE | re.IGNORECASE)[0]
        yield from chapters_of(text, heading, manner, held_out)

    return read


def austen(folder: Path) -> Iterator[Document]:
    """Six novels, each one R character vector of lines, in R's lazy-load format: (unpacked size u32, zlib) per object.

    An unpacked block is R's XDR serialization: a header, then per string 4 bytes of flags, its length, its bytes.
    """
    blob = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while blob:
        unpacker = zlib.decompressobj()
        block, blob = unpacker.decompress(blob[4:]), unpacker.unused_data
        position = 14 + int.from_bytes(block[14:18], "big") + 4 + 8  # past the header, its encoding's name, the count
        lines = []
        while position < len(block):
            length = int.from_bytes(block[position + 4 : position + 8], "big")
            lines.append(block[position + 8 : position + 8 + length].decode())
            position += 8 + length
        last = {f"chapter {number}" for number in range(20, 25)} if lines[0] == "Persuasion" else set()
        held_out = lambda title, last=last: title.lower() in last  # noqa: E731
        yield from chapters_of("\n".join(lines), r"^(?:CHAPTER|Chapter) \w+", "Jane Austen", held_out)


def sword(manner: str) -> Reader:
    """A reader for a SWORD module: an index of (offset, size, unpacked size) u32 triples, zlib blocks, OSIS markup."""

    def read(folder: Path) -> Iterator[Document]:
        for index in sorted(folder.rglob("*t.?zs"), reverse=True):  # the Old Testament ("ot") first
            packed, table = index.with_suffix(f"{index.suffix[:-1]}z").read_bytes(), index.read_bytes()
            entries = struct.iter_unpack("<III", table)
            osis = b"".join(zlib.decompress(packed[at : at + size]) for at, size, _ in entries if size).decode()
            osis = re.sub(r"<(note|rdg)\b.*?</\1>|<milestone[^>]*>", "", osis, flags=re.DOTALL)
            for chapter in re.split(r"(?=<chapter [^>]*sID=)", osis)[1:]:
                name = re.match(r'<chapter [^>]*osisID="([^"]*)"', chapter)
                text = re.sub(r'<div [^>]*type="x-p"/>|</?title[^>]*>|</?(?:lg|list|item)\b[^>]*>', "\n\n", chapter)
                text = re.sub(r"<[^>]*>", "", re.sub(r"<(?:l|lb)\b[^>]*>", " ", text)).replace("&amp;", "&")
                text = re.sub(r" +([,.;:?!])", r"\1", text)
                if body := [p for p in paragraphs_of(text) if len(p) > 20]:
                    yield Document(name.group(1) if name else "", body, manner)

    return read


def entries_of(text: str, entry: str, manner: str) -> Iterator[Document]:
    """Cut a dictionary at the lines that match `entry`, whose first group is the term defined."""
    starts = [*re.finditer(entry, text, re.MULTILINE)]
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=True):
        term = clean(start.group(1))
        if body := paragraphs_of(text[start.end() : end]):
            yield Document(term, body, manner, definition_of=term.lower() if term.isupper() else term)


def devil(folder: Path) -> Iterator[Document]:
    """The Devil's Dictionary: entries begin "TERM, n. ..."."""
    text = gzip.decompress((folder / "usr/share/dictd/devil.dict.dz").read_bytes()).decode("latin-1")
    yield from entries_of(text, r"^([A-Z][A-Z' -]{2,}), (?:n|adj|v|adv|p|pp|pro)\.[a-z. ]*", "Ambrose Bierce")


def jargon(folder: Path) -> Iterator[Document]:
    """The Jargon File: the glossary as entries ":term: /sound/, n.", the essays around it as chapters."""
    text = gzip.decompress((folder / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode("utf-8")
    essays, _, rest = text.partition("\nGlossary\n")
    glossary, _, appendix = rest.partition("\nAppendix A. Hacker Folklore\n")
    unlinked = re.compile(r"[{}]")
    yield from entries_of(unlinked.sub("", glossary), r"^   :([^:\n]{1,40}):(?: .*)?$", "the Jargon File")
    for title, essay in (("Introduction", essays), ("Appendix", appendix.partition("\nBibliography\n")[0])):
        yield Document(title, paragraphs_of(unlinked.sub("", essay)), "the Jargon File")


def python_docs(folder: Path) -> Iterator[Document]:
    """Python's documentation: the prose paragraphs of its reStructuredText, without code, tables and directives."""
    for path in sorted(folder.rglob("*.rst.txt")):
        text = path.read_text("utf-8")
        blocks = [block for block in re.split(r"\n\s*\n", text) if re.match(r" {0,3}[A-Z`*]", block)]
        prose = [re.sub(r":[\w:]+:`[~!]?([^`<]+?)(?: <[^`]*>)?`", r"\1", block) for block in blocks]
        prose = [re.sub(r"`([^`<]+?)(?: <[^`]*>)?`_+", r"\1", block) for block in prose]
        prose = [clean(re.sub(r"``|\*\*?|::?$", "", block)) for block in prose]
        if body := [p for p in prose if is_prose(p) and len(p) > 60 and re.search(r"[.:!?]\"?\)?$", p)]:
            yield Document(path.name.removesuffix(".rst.txt"), body, "the Python documentation")


def sources() -> Iterable[Source]:
    """Every source; the order is that of the model card."""
    expired = "public domain (author died more than 70 years ago)"
    return (
        Source("r-cran-janeaustenr", "Jane Austen's six novels (1811-1817)", expired, austen),
        Source(
            "golang-github-colinmarc-hdfs-dev",
            "Herman Melville, Moby-Dick (1851)",
            expired,
            gutenberg("mobydick.txt", r"^(?:CHAPTER \d+\.|Epilogue).*", "Herman Melville"),
        ),
        Source(
            "golang-github-jdkato-prose-dev",
            "Arthur Conan Doyle, The Adventures of Sherlock Holmes (1892)",
            expired,
            gutenberg(
                "sherlock.txt",
                r"^(?:ADVENTURE )?[IVX]+\. (?:A|THE) [A-Z' -]+$",
                "Arthur Conan Doyle",
                lambda title: "COPPER BEECHES" in title,
            ),
        ),
        Source(
            "golang-github-pierrec-lz4-dev",
            "Mark Twain, The Adventures of Tom Sawyer (1876)",
            expired,
            gutenberg("Mark.Twain-Tom.Sawyer.txt", r"^(?:CHAPTER [IVXL]+|CONCLUSION)", "Mark Twain"),
        ),
        Source(
            "golang-github-andybalholm-brotli-dev",
            "Isaac Newton, Opticks (fourth edition, 1730)",
            expired,
            gutenberg("Isaac.Newton-Opticks.txt", r"^_(?:DEFIN|PROP|Exper|Obs)\b.*?_?$|^SIR ISAAC.*", "Isaac Newton"),
        ),
        Source("dict-devil", "Ambrose Bierce, The Devil's Dictionary (1911)", "public domain", devil),
        Source("jargon-text", "The Jargon File 4.4.7", "public domain", jargon),
        Source("sword-text-web", "World English Bible", "public domain", sword("the Bible")),
        Source("sword-comm-mhcc", "Matthew Henry's Concise Commentary (1706)", "public domain", sword("Matthew Henry")),
        Source("sword-comm-tdavid", "C. H. Spurgeon, The Treasury of David (1885)", "public domain", sword("Spurgeon")),
        Source("python3.11-doc", "Python 3.11 documentation", "PSF licence version 2", python_docs),
    )
