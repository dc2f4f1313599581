"""TensorBoard: scalars and text tables, by one writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """The run's only event writer; the controller owns it."""

    def __init__(self, folder: Path | str, purge_step: int | None) -> None:
        """Open `folder`; after resuming from step k, `purge_step=k + 1` hides the later values
        that the interrupted run wrote, so that every step has one.
        """
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step and flush them."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(
        self, step: int, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None:
        """Write a text table."""
        lines = [header, ["---"] * len(header), *rows]
        text = "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)
        self.text(step, name, text)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write text, shown as markdown, and flush it."""
        self._writer.add_text(name, markdown, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cell(value: object) -> str:
    """Keep a value inside its markdown cell: no bar, tag or line break of its own."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return "<br>".join(text.splitlines())
