"""Text as bytes: by default the source of the installed Python standard library, megabytes of text on every machine."""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT = 10  # one part in HELD_OUT is held out
MINIMUM_BYTES = 4096  # of each part: less neither trains a model nor measures one
# Installed packages differ between machines; tests are bulky and full of encoded data.
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def load_corpus(path: str | None = None) -> tuple[Tensor, Tensor]:
    """Return (training text, held-out text), each uint8 [bytes]; the same split on every rank and in every run.

    path: a file, a directory (its text files, hidden and binary ones skipped), or None for the standard library.
    Of ten files or more, every tenth in order of name hash is held out; of fewer, the last tenth of the text.
    Raises FileNotFoundError if path does not exist, ValueError if it holds too little text.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise FileNotFoundError(f"no text at {root}: give a text file or a directory of text files that exists")
    texts = _read_texts(root, standard_library=path is None)
    if len(texts) >= HELD_OUT:
        ranked = sorted(texts, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        held_out_names = set(ranked[::HELD_OUT])
        train = b"\n".join(text for name, text in texts.items() if name not in held_out_names)
        held_out = b"\n".join(text for name, text in texts.items() if name in held_out_names)
    else:
        text = b"\n".join(texts.values())
        cut = len(text) - len(text) // HELD_OUT
        train, held_out = text[:cut], text[cut:]
    if min(len(train), len(held_out)) < MINIMUM_BYTES:
        raise ValueError(
            f"{root} has too little text: its {len(texts)} text files give {len(train)} bytes to train on and "
            f"{len(held_out)} held out, and each must be {MINIMUM_BYTES} or more; give a larger file or directory"
        )
    return _as_tensor(train), _as_tensor(held_out)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text that do not overlap; item i is (ids, labels), int64 [context] each, labels one byte ahead.

    count: the number of windows to keep, spread evenly over the text; all, if there are fewer.
    Raises ValueError if the text has no whole window or count is less than 1.
    """

    def __init__(self, text: Tensor, context: int, count: int | None = None) -> None:
        self.available = (len(text) - 1) // context  # the last label lies one byte past its window
        if self.available < 1:
            raise ValueError(f"{len(text)} bytes hold no window of context {context}; give {context + 1} or more")
        if count is not None and count < 1:
            raise ValueError(f"count is {count}; ask for at least one window, or None for all")
        self.text = text
        self.context = context
        self.count = min(count or self.available, self.available)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = index * self.available // self.count * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def _read_texts(root: Path, standard_library: bool) -> dict[str, bytes]:
    """Return the contents of every text file by relative name, sorted by name."""
    if root.is_file():
        return {root.name: root.read_bytes()}
    files = {}
    for file in root.rglob("*.py" if standard_library else "*"):
        relative = file.relative_to(root)
        skipped = NOT_STANDARD_LIBRARY.intersection(relative.parts[:-1]) if standard_library else _is_hidden(relative)
        if not skipped and file.is_file():
            files[relative.as_posix()] = file
    texts = {name: files[name].read_bytes() for name in sorted(files)}
    return {name: text for name, text in texts.items() if text and not _is_binary(text)}


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _is_binary(text: bytes) -> bool:
    return b"\0" in text[:8192]  # git's rule


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
