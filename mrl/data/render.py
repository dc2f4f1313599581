"""From a row's prompt to text and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.data.limits import limited

_TEMPLATE_S = 60.0  # for one conversation, which takes milliseconds
_MEDIA_COLUMNS = ("images", "videos", "audios")
Message = Mapping[str, Any]
Chat = Sequence[Message]


def media_columns() -> tuple[str, ...]:
    """Name the columns that a text-only run refuses."""
    return _MEDIA_COLUMNS


def refuse_media(row: Mapping[str, Any], prompt: str | Chat, where: str) -> None:
    """Refuse a row that carries images, videos or audio.

    Raises:
        ValueError: naming the row and what it carries.
    """
    found = [name for name in _MEDIA_COLUMNS if row.get(name)]
    if not isinstance(prompt, str):
        for message in prompt:
            content = message.get("content")
            if isinstance(content, list):
                kinds = [p.get("type") if isinstance(p, Mapping) else "text" for p in content]
                found += [str(kind) for kind in kinds if kind != "text"]
    if found:
        raise ValueError(
            f"{where}: {', '.join(found)} given, the model is text-only; remove the column or "
            "the row"
        )


class PromptRenderer:
    """Renders prompts with a tokenizer's chat template and encodes them.

    A chat list goes through the template with the generation prompt. A string is one user turn if
    the tokenizer has a template, and stands for itself otherwise. The ids start with exactly one
    BOS if the tokenizer adds one to plain text, whether or not the template writes it; a tokenizer
    that adds none gets what the template writes.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._has_template = bool(tokenizer.chat_template)
        bos = tokenizer.bos_token_id
        first = list(tokenizer("a")["input_ids"])[:1]
        self._bos: int | None = bos if bos is not None and first == [bos] else None

    def text(self, prompt: object, where: str) -> str:
        """Render a prompt for generation.

        Raises:
            ValueError: naming the row, if the prompt is empty, is neither text nor a chat, or is
                refused by the template (then naming the role, too).
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"{where}: the prompt is empty")
            if not self._has_template:
                return as_unicode(prompt, f"{where}: the prompt")
            return self.chat_text([{"role": "user", "content": prompt}], where)
        chat = as_chat(prompt, where)
        if not any(message.get("content") or message.get("tool_calls") for message in chat):
            raise ValueError(f"{where}: the prompt is empty")
        return self.chat_text(chat, where)

    def chat_text(self, chat: Chat, where: str, add_generation_prompt: bool = True) -> str:
        """Render messages.

        Raises:
            ValueError: naming the row and the role of the message that the template refuses.
        """
        if not self._has_template:
            raise ValueError(
                f"{where}: the prompt is a chat, the tokenizer has no chat template; give it one "
                "(chat_template.jinja in the model folder) or use plain strings"
            )
        try:
            text = self._apply(chat, add_generation_prompt)
        except TimeoutError as error:
            raise ValueError(
                f"{where}: the chat template took more than {_TEMPLATE_S:.0f} s: does it end?"
            ) from error
        except Exception as error:  # a program of the model's: it raises what it likes
            number = self._first_refused(chat)
            role = chat[number].get("role")
            raise ValueError(
                f"{where}: the chat template refuses message {number} with role {role!r}: {error}"
            ) from error
        return as_unicode(text, f"{where}: the prompt")

    def _apply(self, chat: Chat, add_generation_prompt: bool) -> str:
        with limited(_TEMPLATE_S):
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in chat],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._kwargs,
                )
            )

    def _first_refused(self, chat: Chat) -> int:
        """Find the message that breaks the rendering: the end of the shortest refused start."""
        for end in range(1, len(chat)):
            try:
                self._apply(chat[:end], add_generation_prompt=False)
            except Exception:
                return end - 1
        return len(chat) - 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode rendered prompts, in parallel where the tokenizer can."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [self._with_bos(list(ids)) for ids in encoded]

    def encode_response(self, text: str) -> list[int]:
        """Encode text that follows a prompt: no special token is added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None or ids[:1] == [self._bos]:
            return ids
        return [self._bos, *ids]

    def cut(self, ids: Sequence[int], limit: int, side: str) -> tuple[int, ...]:
        """Cut ids down to a limit at the `left` or the `right`; a leading BOS stays."""
        if len(ids) <= limit:
            return tuple(ids)
        if side == "right":
            return tuple(ids[:limit])
        bos = tuple(ids[:1]) if self._bos is not None else ()
        return bos + tuple(ids[len(ids) - (limit - len(bos)) :])


def as_unicode(text: str, what: str) -> str:
    """Check that a text has none but whole characters: JSON can spell halves of a pair.

    Raises:
        ValueError: naming `what` and the half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{what} has {half!a} at character {error.start}, half of a surrogate pair: no text"
        ) from error
    return text


def as_chat(value: object, where: str) -> Chat:
    """Check that a value is a list of messages.

    Raises:
        ValueError: naming the row and what is wrong.
    """
    if not isinstance(value, list):
        found = "missing" if value is None else type(value).__name__
        raise ValueError(f"{where}: the prompt is {found}, expected a string or a list of messages")
    if not value:
        raise ValueError(f"{where}: the prompt is empty")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {number} has no role, found {message!r}")
    return value
