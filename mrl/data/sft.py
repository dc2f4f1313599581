"""Rows of prompt and response for supervised training."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mrl.config.schema import DataConfig
from mrl.data.dataset import check_truncation, scan_with_progress
from mrl.data.files import RowFiles
from mrl.data.render import PromptRenderer, media_columns, refuse_media

logger = logging.getLogger(__name__)


class SFTDataset:
    """Examples of parquet and jsonl files: prompt ids, and response ids that end with EOS."""

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
    ) -> None:
        """Index the files and, with truncation `error` or `filter`, measure all examples once.

        Args:
            files: `.parquet` and `.jsonl` files, read end to end.
            tokenizer: renders and encodes; it must have an EOS token.
            config: the keys, the limits of prompt and response in tokens, the truncation mode.

        Raises:
            ValueError: if a file, a column or the EOS token is missing, no row is left, or (naming
                the row) a prompt or response is empty, unusable or too long.
        """
        check_truncation(config.truncation)
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token: a response could never end")
        self._rows = RowFiles(files)
        self._config = config
        self._renderer = PromptRenderer(tokenizer, config.apply_chat_template_kwargs)
        self.num_filtered = 0  # rows that truncation=filter left out
        self._rows.require(
            {
                config.prompt_key: "set data.prompt_key to the column that holds the prompt",
                config.response_key: "set data.response_key to the column that holds the response",
            }
        )
        if not len(self._rows):
            raise ValueError(f"0 rows in {self._rows}")
        self._kept = np.arange(len(self._rows), dtype=np.int64)  # [len], file rows in use
        if config.truncation in ("error", "filter"):
            self._bound_lengths()
        else:
            self.example(0)

    def __len__(self) -> int:
        return len(self._kept)

    def _index(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return int(self._kept[i])

    def where(self, i: int) -> str:
        """Name the file of row i and its place there."""
        return self._rows.where(self._index(i))

    def example(self, i: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Encode row i as (prompt ids [P], response ids [R] with EOS).

        With truncation `left` or `right` a long prompt is cut at that side; a long response is cut
        at its end and then has no EOS.

        Raises:
            ValueError: naming the row, if a side is empty or unusable.
        """
        config = self._config
        ((prompt, response),) = self._encode([self._rows.row(self._index(i))], [self.where(i)])
        return (
            self._renderer.cut(prompt, config.max_prompt_length, config.truncation),
            self._renderer.cut(response, config.max_response_length, "right"),
        )

    def _encode(
        self, rows: Sequence[Mapping[str, Any]], places: Sequence[str]
    ) -> list[tuple[list[int], list[int]]]:
        """Encode rows in full, in one batch."""
        prompts, responses = [], []
        for row, where in zip(rows, places, strict=True):
            prompt = row.get(self._config.prompt_key)
            prompts.append(self._renderer.text(prompt, where))
            refuse_media(row, prompt or "", where)
            response = row.get(self._config.response_key)
            if not isinstance(response, str) or not response:
                raise ValueError(f"{where}: the response is {response!r}, expected non-empty text")
            responses.append(response)
        eos = self._renderer.tokenizer.eos_token_id
        return [
            (prompt_ids, [*self._renderer.encode_response(response), eos])
            for prompt_ids, response in zip(self._renderer.encode(prompts), responses, strict=True)
        ]

    def _bound_lengths(self) -> None:
        """Measure all examples, batch by batch, and keep or refuse the long ones."""
        config = self._config
        limits = np.array([config.max_prompt_length, config.max_response_length])
        lengths = np.empty((len(self._rows), 2), dtype=np.int64)
        columns = [config.prompt_key, config.response_key, *media_columns()]
        for first, batch in scan_with_progress(self._rows, columns, "example lengths"):
            places = [self._rows.where(first + i) for i in range(len(batch))]
            encoded = self._encode(batch, places)
            lengths[first : first + len(batch)] = [(len(p), len(r)) for p, r in encoded]
        fits = (lengths <= limits).all(axis=1)
        long = int((~fits).sum())
        if not long:
            return
        if config.truncation == "error":
            row = int(fits.argmin())
            raise ValueError(
                f"{self._rows.where(row)}: prompt and response have {lengths[row, 0]} and "
                f"{lengths[row, 1]} tokens, data.max_prompt_length is {limits[0]} and "
                f"data.max_response_length {limits[1]}; {long} of {len(lengths)} rows are longer; "
                f"the longest need {lengths[:, 0].max()} and {lengths[:, 1].max()}; or set "
                "data.truncation=filter, left or right"
            )
        if not fits.any():
            raise ValueError(f"0 rows after filtering: all {long} rows of {self._rows} are longer")
        self.num_filtered = long
        self._kept = np.flatnonzero(fits)
        logger.warning("%d of %d examples filtered: too long", long, len(lengths))

    def fingerprint(self) -> str:
        """Identify the examples and their order."""
        digest = hashlib.sha256(self._rows.fingerprint().encode())
        digest.update(self._kept.tobytes())
        return digest.hexdigest()
