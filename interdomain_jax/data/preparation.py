"""From a source of text to a prepared corpus: what is to be done, shard by shard, and what has been done already.

A task tokenises one part of a source and writes one shard, whoever does it, wherever: the files depend on the source,
the tokenizer and the size of a part alone. A task whose shard is complete is not done again.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from etils import epath

from interdomain_jax import strict_json
from interdomain_jax.data import SPLITS
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.sources import Part, TextSource
from interdomain_jax.data.token_files import (
    FORMAT,
    MANIFEST,
    Manifest,
    Shard,
    read_shard,
    shard_name,
    write_json,
    write_manifest,
    write_shard,
)
from interdomain_jax.data.tokenizers import fingerprint, load_tokenizer

_PLAN = "plan.json"
_ERROR = ".error"
_READERS = 16

_tokenizer = functools.cache(load_tokenizer)


class Task(NamedTuple):
    """The work of one worker at a time.

    Attributes:
        source: of the text.
        part: of the source.
        split: whose texts are taken.
        directory: of the split.
        name: of the shard.
        tokenizer: its name.
        fingerprint: of the tokenizer.
    """

    source: TextSource
    part: Part
    split: str
    directory: epath.Path
    name: str
    tokenizer: str
    fingerprint: str

    def do(self) -> Shard:
        """Writes the shard; what is wrong with the source or the tokenizer is left beside it in one sentence.

        Raises:
            ValueError: the source or the tokenizer is not what it must be.
            OSError: a file cannot be read or written.
        """
        try:
            tokenizer = _tokenizer(self.tokenizer)
            if fingerprint(tokenizer) != self.fingerprint:
                raise ValueError(
                    f"the tokenizer {self.tokenizer!r} has fingerprint {fingerprint(tokenizer)} on a worker and "
                    f"{self.fingerprint} where the preparation began: give all of them the same file"
                )
            texts = (documents_of(text.content) for text in self.source.texts(self.part, self.split))
            shard = write_shard(self.directory, self.name, texts, tokenizer)
        except (ValueError, OSError) as error:
            (self.directory / f"{self.name}{_ERROR}").write_text(str(error))
            raise
        # Of an attempt before, if a runner makes several.
        (self.directory / f"{self.name}{_ERROR}").unlink(missing_ok=True)
        return shard


Run = Callable[[Sequence[Task]], None]
"""Does tasks, in any order and anywhere, and returns when all are done."""


def run_here(tasks: Sequence[Task]) -> None:
    """Does the tasks one after another in this process."""
    for task in tasks:
        task.do()


class Plan(NamedTuple):
    """What a split is going to be.

    Attributes:
        directory: of the split.
        manifest: without its shards.
        tasks: one for each shard, in their order.
    """

    directory: epath.Path
    manifest: Manifest
    tasks: list[Task]

    def shards(self, known: Mapping[str, Shard]) -> dict[str, Shard]:
        """The shards that are complete, by name, those that are `known` among them: they are not read again."""
        written = {path.stem for path in self.directory.glob("*.json")}
        names = [task.name for task in self.tasks if task.name in written and task.name not in known]
        # A bucket takes its time for each.
        with futures.ThreadPoolExecutor(_READERS) as readers:
            read = readers.map(functools.partial(read_shard, self.directory), names)
            return {**known, **{name: shard for name, shard in zip(names, read, strict=True) if shard is not None}}

    def is_complete(self) -> bool:
        """Whether all shards are there, and the manifest."""
        return (self.directory / MANIFEST).exists() and not self.missing()

    def missing(self) -> list[Task]:
        """The tasks whose shards are not complete."""
        complete = self.shards({})
        return [task for task in self.tasks if task.name not in complete]

    def complete(self) -> Manifest:
        """Writes the manifest of a split whose shards are all there.

        Raises:
            ValueError: it has no document.
        """
        complete = self.shards({})
        shards = tuple(complete[task.name] for task in self.tasks)
        if not sum(shard.documents for shard in shards):
            skipped = sum(sum(shard.skipped.values()) for shard in shards)
            raise ValueError(
                f"{self.manifest.corpus} has no document for the {self.manifest.split} split, {skipped} texts skipped; "
                f"the rule is: {self.manifest.split_rule}"
            )
        manifest = self.manifest._replace(shards=shards)
        write_manifest(self.directory, manifest)
        return manifest


def plan(
    source: TextSource, directory: epath.PathLike, tokenizer_name: str, *, part_bytes: int | None = None
) -> dict[str, Plan]:
    """Makes the directories of the splits, and notes in them what they will hold.

    Args:
        source: of the text.
        directory: for the corpus; created if missing.
        tokenizer_name: as `load_tokenizer` takes it.
        part_bytes: text in a shard, about; the source's own number if None.

    Raises:
        ValueError: the directory holds another preparation or other files, or the tokenizer or the source is not right.
        FileNotFoundError: there is no such tokenizer or file.
    """
    tokenizer = _tokenizer(tokenizer_name)
    parts = source.parts(part_bytes or source.part_bytes)
    listing = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    plans = {}
    for split in SPLITS:
        below = epath.Path(directory) / split
        manifest = Manifest(
            format=FORMAT,
            corpus=source.info.full_name,
            files=source.files,
            split=split,
            split_rule=source.split_rule,
            tokenizer=tokenizer_name,
            fingerprint=fingerprint(tokenizer),
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            shards=(),
        )
        noted = _note(below, manifest._asdict() | {"shards": len(parts), "parts": listing})
        # One tokenizer may have several names; the files are to be the same whichever is given.
        manifest = manifest._replace(tokenizer=noted["tokenizer"])
        tasks = [
            Task(source, part, split, below, shard_name(number, len(parts)), tokenizer_name, manifest.fingerprint)
            for number, part in enumerate(parts)
        ]
        plans[split] = Plan(below, manifest, tasks)
    return plans


def carry_out(plans: Mapping[str, Plan], run: Run) -> dict[str, Manifest]:
    """Writes the shards that are missing and the manifests, which are returned.

    Args:
        plans: from `plan`.
        run: does the tasks.

    Raises:
        ValueError: the source cannot be read, a worker has another tokenizer, or a split has no document.
    """
    try:
        run([task for planned in plans.values() for task in planned.missing()])
    # A runner wraps what its workers raise in an exception of its own.
    except Exception as error:
        left = sorted(path for planned in plans.values() for path in planned.directory.glob(f"*{_ERROR}"))
        if not left:
            raise
        raise ValueError(left[0].read_text()) from error
    return {split: planned.complete() for split, planned in plans.items()}


def remove_unfinished(directory: epath.Path) -> None:
    """Removes what workers that were killed have left; when no other prepares the same corpus."""
    for split in SPLITS:
        for path in (directory / split).glob("*.tmp"):
            path.unlink()


def _note(directory: epath.Path, content: dict[str, Any]) -> dict[str, Any]:
    """Notes a plan, or returns the one that is noted, if it is the same but for the tokenizer's name.

    Raises:
        ValueError: the directory holds other files, or another preparation.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Listed first: another process may note the same plan at any moment, and go on.
    others = any(directory.glob("*.json"))
    path = directory / _PLAN
    if not path.exists():
        if others:
            raise ValueError(f"{directory} holds other files: give an empty directory")
        write_json(path, content)
    there = json.loads(path.read_text())
    here = json.loads(strict_json.dumps(content))
    differences = [
        f"{name} is {there.get(name)!r} there and {value!r} here"
        for name, value in here.items()
        if there.get(name) != value and name != "tokenizer"
    ]
    if differences:
        raise ValueError(
            f"{directory} holds another preparation: {'; '.join(differences)}; give another directory, or delete it"
        )
    for left in directory.glob(f"*{_ERROR}"):
        left.unlink(missing_ok=True)
    return there
