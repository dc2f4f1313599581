"""Preference rows: one prompt, a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import DataConfig
from mrl.data.render import Chat, PromptRenderer, as_chat
from mrl.types import Prompt


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two responses to one prompt; each side is `prompt_ids` followed by its ids."""

    prompt_ids: tuple[int, ...]  # [P], generation prompt included
    chosen_ids: tuple[int, ...]  # [R], end of sequence included unless cut
    rejected_ids: tuple[int, ...]  # [R], end of sequence included unless cut


@dataclass(frozen=True, slots=True)
class PairRows:
    """The rows of a dataset whose two sides differ."""

    rows: tuple[int, ...]
    num_identical: int


def split_pair(
    row: Mapping[str, Any],
    prompt_key: str,
    prompt: Prompt,
    renderer: PromptRenderer,
    config: DataConfig,
    where: str,
) -> PreferencePair:
    """Encode both sides of a row.

    A side is the response as text, or messages: the whole conversation (which repeats all the
    prompt's messages) or what follows the prompt. A conversation that ends with the prompt is an
    empty response. Both sides are cut at the right to `data.max_response_length`.

    Raises:
        ValueError: naming the row, if a side is missing or of another kind.
    """
    sides = {}
    for name in ("chosen", "rejected"):
        side = row.get(name)
        if isinstance(side, str):
            ids = [*renderer.encode_response(side), renderer.tokenizer.eos_token_id]
        elif isinstance(side, list):
            chat = _as_messages(row[prompt_key], where)
            ids = _continuation(chat, side, renderer, f"{where} {name}")
        else:
            raise ValueError(
                f"{where}: {name!r} is {'missing' if side is None else type(side).__name__}, "
                "expected the response as a string or a list of messages"
            )
        sides[name] = tuple(ids[: config.max_response_length])
    return PreferencePair(prompt.token_ids, sides["chosen"], sides["rejected"])


def _as_messages(prompt: object, where: str) -> Chat:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return as_chat(prompt, where)


def _continuation(prompt: Chat, side: list[Any], renderer: PromptRenderer, where: str) -> list[int]:
    """Encode what a conversation adds to its prompt."""
    if side[: len(prompt)] == list(prompt):
        side = side[len(prompt) :]
    if not side:
        return []
    before = renderer.chat_text(prompt, where)
    whole = renderer.chat_text([*prompt, *as_chat(side, where)], where, add_generation_prompt=False)
    if not whole.startswith(before):
        raise ValueError(
            f"{where}: the chat template renders the conversation differently from its prompt, so "
            "no response can be cut out; give the response as a string"
        )
    return renderer.encode_response(whole[len(before) :])
