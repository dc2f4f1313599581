"""Checkpoints that are complete or do not count.

A save is written to `global_step_<N>.tmp-<id>`, gets its COMPLETE marker (the list of files and
sizes) last, and is renamed to `global_step_<N>`. What a kill leaves behind is never mistaken for a
checkpoint. One process, the controller, calls this; workers only write into `begin`'s folder, and
flush what they write.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path

from mrl.checkpoint.atomic import sync_to_disk, write_atomically

MARKER = "COMPLETE"
TRACKER = "latest_checkpointed_iteration.txt"
SUPERSEDED = "superseded"
BEST = "best"  # a link
_FINAL = re.compile(r"global_step_(\d+)")
_DRAFT = re.compile(r"global_step_(\d+)\.tmp-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that cannot be resumed from, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest complete checkpoint, and the newer ones that were passed over."""

    found: Found | None
    skipped: tuple[Skipped, ...]


class CheckpointFolder:
    """The checkpoints of one run, `root/global_step_<N>`."""

    def __init__(self, root: Path | str, keep: int | None = None) -> None:
        """Open `root`; `keep` newest complete checkpoints stay (None: all).

        Raises:
            ValueError: keep is below 1.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1, or None for all")
        self.root = Path(root).absolute()  # ranks may work in another folder
        self.keep = keep
        self._drafts: dict[int, Path] = {}

    def begin(self, step: int) -> Path:
        """Make the folder that workers write the checkpoint of `step` into.

        Raises:
            ValueError: `step` has a complete checkpoint already; see `has` and `set_aside`.
        """
        if self.has(step):
            raise ValueError(
                f"{self._final(step)} is already complete and is never overwritten; skip this "
                "save, or set the newer checkpoints aside first"
            )
        draft = self.root / f"global_step_{step}.tmp-{uuid.uuid4().hex[:8]}"
        draft.mkdir(parents=True)
        self._drafts[step] = draft
        return draft

    def draft(self, step: int) -> Path:
        """Give the folder that `begin(step)` made."""
        return self._drafts[step]

    def abandon(self, step: int) -> None:
        """Give up what `begin(step)` made, and its space on the disk."""
        draft = self._drafts.pop(step, None)
        if draft is not None and draft.is_dir():
            _delete(draft)

    def commit(self, step: int, best: int | None = None) -> Path:
        """Declare the checkpoint of `step` complete, then delete what `keep` does not cover.

        `best` is the step of the best one: it is not deleted, and `best` links to it.

        Raises:
            ValueError: `begin(step)` was not called.
            OSError: the disk failed; older checkpoints are untouched.
        """
        if step not in self._drafts:
            raise ValueError(f"commit of step {step} without begin; open: {sorted(self._drafts)}")
        draft, final = self._drafts[step], self._final(step)
        _mark_complete(draft, step)
        if final.exists():  # a broken one: begin refuses complete ones
            self._move_aside(final)
        draft.rename(final)
        del self._drafts[step]
        sync_to_disk(self.root)
        write_atomically(self.root / TRACKER, f"{step}\n")
        if best is not None and self.has(best):
            self._link_best(best)
        self._prune(step, best)
        return final

    def has(self, step: int) -> bool:
        """Tell whether `step` has a complete checkpoint."""
        return why_incomplete(self._final(step)) is None

    def steps(self) -> list[int]:
        """List the steps that have a folder, complete or not, ascending by number."""
        if not self.root.is_dir():
            return []
        names = (_FINAL.fullmatch(p.name) for p in self.root.iterdir() if p.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def latest(self) -> Latest:
        """Find the newest complete checkpoint by number; the tracker file is not needed."""
        skipped: list[Skipped] = list(self._missing_by_tracker())
        for step in reversed(self.steps()):
            path = self._final(step)
            reason = why_incomplete(path)
            if reason is None:
                return Latest(Found(step, path), tuple(skipped))
            skipped.append(Skipped(path, reason))
        return Latest(None, tuple(skipped))

    def resume_point(self, mode: str, path: str | None) -> Latest:
        """Apply trainer.resume_mode: where to continue, or `found=None` to start at step 0.

        - auto: the newest complete checkpoint; a fresh start only where there is none at all.
        - disable: a fresh start.
        - resume_path: the checkpoint at `path`.

        Before training, call `set_aside(found.step)`, or `set_aside(-1)` for a fresh start, so
        that checkpoints of the abandoned future cannot be taken up later.

        Raises:
            ValueError: every checkpoint is damaged, `path` is not complete, or a bad mode.
        """
        match mode:
            case "auto":
                return self._auto()
            case "disable":
                return Latest(None, ())
            case "resume_path":
                return Latest(open_checkpoint(path), ())
        raise ValueError(f"trainer.resume_mode is {mode!r}, expected auto, disable or resume_path")

    def set_aside(self, after: int) -> list[Path]:
        """Move the checkpoints of steps above `after` into `superseded/`; nothing is deleted.

        The tracker then names the newest complete one that stays. Returns the new places.
        """
        moved = [self._move_aside(self._final(s)) for s in self.steps() if s > after]
        if moved:
            (self.root / TRACKER).unlink(missing_ok=True)
            if (self.root / BEST).is_symlink() and not (self.root / BEST).exists():
                (self.root / BEST).unlink()  # it was of the abandoned future
            found = self.latest().found
            if found is not None:
                write_atomically(self.root / TRACKER, f"{found.step}\n")
        return moved

    def _auto(self) -> Latest:
        latest = self.latest()
        if latest.found is None and self.steps():
            reasons = "; ".join(f"{s.path}: {s.reason}" for s in latest.skipped)
            raise ValueError(
                f"no checkpoint under {self.root} is complete ({reasons}); repair one, or start "
                "again at step 0 with trainer.resume_mode=disable"
            )
        return latest

    def _missing_by_tracker(self) -> list[Skipped]:
        tracker = self.root / TRACKER
        if not tracker.is_file():
            return []
        text = tracker.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            return [Skipped(tracker, f"holds {text!r}, expected a step number")]
        path = self._final(int(text))
        return [] if path.is_dir() else [Skipped(path, f"named by {TRACKER}, but not there")]

    def _link_best(self, step: int) -> None:
        link, draft = self.root / BEST, self.root / f"{BEST}.tmp"
        draft.unlink(missing_ok=True)
        draft.symlink_to(self._final(step).name)
        draft.replace(link)
        sync_to_disk(self.root)

    def _prune(self, newest: int, best: int | None) -> None:
        """Delete drafts of killed saves, and all older than the `keep` up to `newest`.

        The best one stays, and does not count; so does one that a run before this called best.
        """
        if best is None and (self.root / BEST).is_symlink():
            linked = _FINAL.fullmatch((self.root / BEST).readlink().name)
            best = int(linked[1]) if linked else None
        for path in self.root.iterdir():
            if _DRAFT.fullmatch(path.name) and path not in self._drafts.values():
                _delete(path)
        if self.keep is None:
            return
        older = [step for step in self.steps() if step <= newest and step != best]
        complete = [step for step in older if self.has(step)]
        count = self.keep - (newest == best)  # the newest is among those that are kept
        first = complete[-count:][0] if count and complete else newest
        for step in older:
            if step < first:
                _delete(self._final(step))

    def _move_aside(self, path: Path) -> Path:
        shelf = self.root / SUPERSEDED
        shelf.mkdir(exist_ok=True)
        number = 0
        while (place := shelf / f"{path.name}-{number}").exists():
            number += 1
        path.rename(place)
        return place

    def _final(self, step: int) -> Path:
        return self.root / f"global_step_{step}"


def open_checkpoint(path: Path | str | None) -> Found:
    """Check one checkpoint folder by path.

    Raises:
        ValueError: there is no path, it is not named global_step_<N>, or it is not complete.
    """
    if path is None:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
    folder = Path(path)
    name = _FINAL.fullmatch(folder.name)
    if name is None:
        raise ValueError(f"trainer.resume_from_path is {path}, expected .../global_step_<N>")
    reason = why_incomplete(folder)
    if reason is not None:
        raise ValueError(f"trainer.resume_from_path is {path}: {reason}")
    return Found(int(name[1]), folder)


def why_incomplete(path: Path) -> str | None:
    """Say what keeps a folder from being a complete checkpoint; None when nothing does."""
    if not path.is_dir():
        return "no such folder"
    marker = path / MARKER
    if not marker.is_file():
        return f"no {MARKER} marker: its save was cut short"
    try:
        sizes: dict[str, int] = json.loads(marker.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{MARKER} marker is unreadable ({error!r})"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were saved"
    return None


def _mark_complete(draft: Path, step: int) -> None:
    """Flush every file, then write the marker that lists them."""
    marker = draft / MARKER
    marker.unlink(missing_ok=True)
    paths = sorted(draft.rglob("*"))
    for path in paths:
        sync_to_disk(path)
    sizes = {p.relative_to(draft).as_posix(): p.stat().st_size for p in paths if p.is_file()}
    write_atomically(marker, json.dumps({"step": step, "files": sizes}, indent=1) + "\n")


def _delete(path: Path) -> None:
    """Delete a folder; a failure is a warning, for training must go on."""
    try:
        (path / MARKER).unlink(missing_ok=True)  # half-deleted must not look complete
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(
            f"could not delete the old checkpoint {path}: {error}; delete it by hand "
            f"(free space: {shutil.disk_usage(path.parent).free / 2**30:.1f} GiB)",
            stacklevel=2,
        )
