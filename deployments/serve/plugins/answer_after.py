"""A reasoning parser for a model that thinks aloud and then says `Answer:`.

vLLM has none for such a model. Publish this folder, stage it as an artifact of kind `plugin`, and name the class in
the Serve YAML: see reasoning-parser.yaml beside this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

MARK = "Answer:"


@ReasoningParserManager.register_module("answer_after")
class AnswerAfterParser(ReasoningParser):
    """What comes before the first `Answer:` is reasoning, what comes after it is content."""

    PREFLIGHT_SAMPLE = f"Two and two make four. {MARK} 4"

    def extract_reasoning(
        self, model_output: str, request: ChatCompletionRequest
    ) -> tuple[str | None, str | None]:
        """The two parts of a whole output."""
        del request
        reasoning, _, content = model_output.partition(MARK)
        return reasoning.strip() or None, content.strip() or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """The part of an output that is new; what may become the mark is held back until it is sure."""
        del delta_text, previous_token_ids, current_token_ids, delta_token_ids
        sent_reasoning, sent_content = _sure(previous_text)
        reasoning, content = _sure(current_text)
        new_reasoning, new_content = reasoning[len(sent_reasoning) :], content[len(sent_content) :]
        if not new_reasoning and not new_content:
            return None
        return DeltaMessage(reasoning=new_reasoning or None, content=new_content or None)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the mark has come; the engine asks before it holds the output to a grammar."""
        return MARK in self.model_tokenizer.decode(list(input_ids))

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens after the mark."""
        for end in range(1, len(input_ids) + 1):
            if self.is_reasoning_end(input_ids[:end]):
                return input_ids[end:]
        return []


def _sure(text: str) -> tuple[str, str]:
    """What of an unfinished output is certainly reasoning, and what is content."""
    reasoning, mark, content = text.partition(MARK)
    if not mark:
        held = max((size for size in range(len(MARK)) if text.endswith(MARK[:size])), default=0)
        reasoning = text[: len(text) - held]
    return reasoning, content
