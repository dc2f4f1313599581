"""Rows of RL data as rendered prompts of bounded length."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from mrl.config.schema import DataConfig
from mrl.data.files import Row, RowFiles
from mrl.data.pairs import PairRows, PreferencePair, split_pair
from mrl.data.render import PromptRenderer, as_unicode, media_columns, refuse_media
from mrl.types import Prompt

logger = logging.getLogger(__name__)

TRUNCATIONS = ("error", "filter", "left", "right")


def check_truncation(truncation: str) -> None:
    """Refuse an unknown `data.truncation`."""
    if truncation not in TRUNCATIONS:
        raise ValueError(
            f"data.truncation is {truncation!r}, expected one of {', '.join(TRUNCATIONS)}"
        )


def scan_with_progress(
    rows: RowFiles, columns: Sequence[str], purpose: str
) -> Iterator[tuple[int, list[Row]]]:
    """Stream rows as `RowFiles.scan` does, telling the reader how far it is."""
    logger.info("%s: reading %d rows of %s", purpose, len(rows), rows)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(purpose, total=len(rows))
        for first, batch in rows.scan(columns):
            yield first, batch
            progress.advance(task, len(batch))


def source_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Give a row's data source, "" for none.

    Raises:
        ValueError: naming the row, if it is no text.
    """
    source = row.get(key)
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{where}: {key} is {source!r}, expected a string")
    return as_unicode(source or "", f"{where}: {key}")


def mapping_of(row: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Give a row's column of named values, empty for none.

    Raises:
        ValueError: naming the row, if it is of another kind.
    """
    value = row.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{where}: {key} is {value!r}, expected an object with named values")
    return value or {}


class RLHFDataset:
    """Prompts of parquet and jsonl files, `len(dataset)` of them after filtering."""

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
    ) -> None:
        """Index the files and, with truncation `error` or `filter`, measure all prompts once.

        Args:
            files: `.parquet` and `.jsonl` files, read end to end.
            tokenizer: renders and encodes; its chat template is used.
            config: the keys, the prompt limit in tokens and the truncation mode.

        Raises:
            ValueError: if a file or column is missing, no row is left, or (naming the row) a
                prompt is empty, carries media, is refused by the template or is too long.
        """
        check_truncation(config.truncation)
        self._rows = RowFiles(files)
        self._config = config
        self._renderer = PromptRenderer(tokenizer, config.apply_chat_template_kwargs)
        self.num_filtered = 0  # rows that truncation=filter left out
        self._rows.require(
            {config.prompt_key: "set data.prompt_key to the column that holds the prompt"}
        )
        if not len(self._rows):
            raise ValueError(f"0 rows in {self._rows}")
        self._kept = np.arange(len(self._rows), dtype=np.int64)  # [len], file rows in use
        if config.truncation in ("error", "filter"):
            self._bound_lengths()
        else:
            self.prompt(0, uid="")  # what is wrong with all rows is known before the run

    def __len__(self) -> int:
        return len(self._kept)

    def _index(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return int(self._kept[i])

    def where(self, i: int) -> str:
        """Name the file of row i and its place there."""
        return self._rows.where(self._index(i))

    def row(self, i: int) -> Mapping[str, Any]:
        """Read row i as plain Python objects, all columns."""
        return self._rows.row(self._index(i))

    def prompt(self, i: int, uid: str) -> Prompt:
        """Render and encode row i.

        Raises:
            ValueError: naming the row, if it holds no usable prompt.
        """
        row, where = self.row(i), self.where(i)
        text = self._text(row, where)
        (ids,) = self._renderer.encode([text])
        if not ids:
            raise ValueError(f"{where}: the prompt has 0 tokens")
        limit = self._config.max_prompt_length
        if len(ids) > limit:  # left or right: the other modes have seen to it
            ids = list(self._renderer.cut(ids, limit, self._config.truncation))
            text = str(self._renderer.tokenizer.decode(ids, skip_special_tokens=False))
        return Prompt(
            uid=uid,
            token_ids=tuple(ids),
            text=text,
            data_source=source_of(row, self._config.reward_fn_key, where),
            ground_truth=mapping_of(row, "reward_model", where).get("ground_truth"),
            extra_info=mapping_of(row, "extra_info", where),
        )

    def _text(self, row: Mapping[str, Any], where: str) -> str:
        prompt = row.get(self._config.prompt_key)
        text = self._renderer.text(prompt, where)
        refuse_media(row, prompt or "", where)
        return text

    def _bound_lengths(self) -> None:
        """Measure all prompts, batch by batch, and keep or refuse the long ones."""
        lengths = np.empty(len(self._rows), dtype=np.int64)
        columns = [self._config.prompt_key, *media_columns()]
        for first, batch in scan_with_progress(self._rows, columns, "prompt lengths"):
            texts = [self._text(row, self._rows.where(first + i)) for i, row in enumerate(batch)]
            encoded = self._renderer.encode(texts)
            lengths[first : first + len(batch)] = [len(ids) for ids in encoded]
        if not lengths.all():
            where = self._rows.where(int(lengths.argmin()))
            raise ValueError(f"{where}: the prompt has 0 tokens")
        limit = self._config.max_prompt_length
        fits = lengths <= limit
        if fits.all():
            return
        long = int((~fits).sum())
        if self._config.truncation == "error":
            row = int(fits.argmin())
            raise ValueError(
                f"{self._rows.where(row)}: the prompt has {lengths[row]} tokens, "
                f"data.max_prompt_length is {limit}; {long} of {len(lengths)} rows are longer; set "
                f"data.max_prompt_length={lengths.max()} or data.truncation=filter, left or right"
            )
        if not fits.any():
            raise ValueError(
                f"0 rows after filtering: all {long} prompts of {self._rows} are longer than "
                f"data.max_prompt_length={limit}; the shortest has {lengths.min()} tokens"
            )
        self.num_filtered = long
        self._kept = np.flatnonzero(fits)
        logger.warning(
            "%d of %d prompts filtered: longer than data.max_prompt_length=%d",
            long,
            len(lengths),
            limit,
        )

    def fingerprint(self) -> str:
        """Identify the prompts and their order: the files' content and the rows in use."""
        digest = hashlib.sha256(self._rows.fingerprint().encode())
        digest.update(self._kept.tobytes())
        return digest.hexdigest()

    def check_rewards(self, known_sources: Collection[str], has_custom: bool) -> None:
        """Refuse rows that no reward function could score; reads the reward columns only.

        Args:
            known_sources: the data sources that have a function.
            has_custom: a custom function scores every row, whatever its columns.

        Raises:
            ValueError: naming a row, the missing field or unknown source, and the ways out.
        """
        if has_custom:
            return
        source_key = self._config.reward_fn_key
        way_out = (
            f"known data sources: {', '.join(known_sources)}; or set a function of your own: "
            "reward.custom_reward_function.path=FILE.py reward.custom_reward_function.name=NAME"
        )
        self._rows.require(dict.fromkeys((source_key, "reward_model"), way_out))
        kept = np.zeros(len(self._rows), dtype=bool)
        kept[self._kept] = True
        unknown: dict[str, list[int]] = {}
        for first, batch in self._rows.scan([source_key, "reward_model"]):
            for i, row in enumerate(batch, start=first):
                if not kept[i]:
                    continue
                where = self._rows.where(i)
                source = source_of(row, source_key, where)
                if source not in known_sources:
                    unknown.setdefault(repr(row.get(source_key)), []).append(i)
                elif mapping_of(row, "reward_model", where).get("ground_truth") is None:
                    raise ValueError(f"{where} has no reward_model.ground_truth; {way_out}")
        if unknown:
            found = "; ".join(
                f"{source_key} {source} ({self._rows.where(rows[0])}, {len(rows)} rows in all)"
                for source, rows in unknown.items()
            )
            raise ValueError(f"no reward function for {found}; {way_out}")

    def pair(self, i: int) -> PreferencePair:
        """Encode the chosen and the rejected response of row i.

        Raises:
            ValueError: naming the row, if a side is missing or both sides are the same.
        """
        pair = self._pair(i)
        if pair.chosen_ids == pair.rejected_ids:
            raise ValueError(
                f"{self.where(i)}: chosen and rejected are the same within "
                f"data.max_response_length={self._config.max_response_length} tokens"
            )
        return pair

    def _pair(self, i: int) -> PreferencePair:
        prompt_key = self._config.prompt_key
        prompt = self.prompt(i, uid="")
        return split_pair(
            self.row(i), prompt_key, prompt, self._renderer, self._config, self.where(i)
        )

    def pair_rows(self) -> PairRows:
        """Find the rows whose sides differ; the others are counted and shown."""
        distinct = []
        for i in range(len(self)):
            pair = self._pair(i)
            if pair.chosen_ids != pair.rejected_ids:
                distinct.append(i)
        identical = len(self) - len(distinct)
        if identical:
            logger.warning("%d of %d pairs dropped: both sides equal", identical, len(self))
        return PairRows(tuple(distinct), identical)
