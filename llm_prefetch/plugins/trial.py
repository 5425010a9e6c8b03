"""Import plugins and exercise them on sample outputs: `python -m llm_prefetch.plugins.trial REQUEST RESULT`.

Runs in a process of its own, which `preflight` starts and bounds. A parser is made and called as vLLM's API layer
and its engine do. What it makes of the sample is checked as far as the parser says what it looks for: by its
`reasoning_start_str` and `reasoning_end_str`, or by a sample of its model's output in `PREFLIGHT_SAMPLE`; where
that is empty, only the form of what it returns is.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_prefetch.errors import PluginError
from llm_prefetch.plugins.loading import load_class, mount
from llm_prefetch.plugins.names import Plugin
from llm_prefetch.plugins.registering import is_model, register_parser
from llm_prefetch.plugins.stand_in import StandInTokenizer

SAMPLE = "PREFLIGHT_SAMPLE"
"""Attribute of a parser's class: an output of its model, with a thought and an answer, or with a call of a tool."""
_THOUGHT, _ANSWER = "I look at the question first.", "The answer is four."
_FOREIGN = (_ANSWER, '{"name": "look_up", "arguments": {"word": "four"}}', "<tool_call>", "")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class _Flaw(Exception):  # noqa: N818 (what is wrong with a plugin, not with us)
    """What a plugin did wrong, in words."""


def main(request: Path, result: Path) -> None:
    """Try what `request` names and write into `result` what was wrong, plugin by plugin."""
    wanted = json.loads(request.read_text("utf-8"))
    mount(wanted["folders"])
    tokenizer = _tokenizer(wanted["tokenizer"])
    flaws = []
    for fields in wanted["plugins"]:
        plugin = Plugin(**fields)
        flaw = _try(plugin, tokenizer)
        if flaw:
            flaws.append({"where": plugin.where, "target": plugin.target, "reason": flaw})
    result.write_text(json.dumps(flaws), "utf-8")


def _tokenizer(folder: str | None) -> Any:  # noqa: ANN401 (vLLM's, or the stand-in)
    """The model's own where it can be had, as a parser's special tokens must be in it."""
    if folder and any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        with contextlib.suppress(Exception):  # one that needs more than its files is not the plugin's fault
            from vllm.tokenizers import get_tokenizer

            return get_tokenizer(folder)
    return StandInTokenizer()


def _try(plugin: Plugin, tokenizer: Any) -> str:  # noqa: ANN401
    """What is wrong with a plugin, or nothing."""
    tries: Mapping[str, Callable[[], None]] = {
        "reasoning": lambda: _try_reasoning(plugin, tokenizer),
        "tool": lambda: _try_tool(plugin, tokenizer),
        "models": lambda: _try_model(plugin),
    }
    try:
        tries[plugin.kind]()
    except PluginError as error:
        return error.message.removeprefix(f"{plugin.where}: {plugin.target}").lstrip(": ")
    except _Flaw as flaw:
        return str(flaw)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a plugin may raise whatever it likes)
        return f"{_method(error)}raised {type(error).__name__}: {error}"
    return ""


def _try_reasoning(plugin: Plugin, tokenizer: Any) -> None:  # noqa: ANN401
    register_parser(plugin)
    kind = load_class(plugin)
    kind(tokenizer=tokenizer)  # as the engine does, then as the API layer does
    parser = kind(tokenizer, model_config=None)
    start, end = parser.reasoning_start_str, parser.reasoning_end_str
    own = getattr(kind, SAMPLE, None)
    sample = own or f"{start or '<think>'}{_THOUGHT}{end or '</think>'}{_ANSWER}"
    known = bool(own or (own is None and start and end))
    answer = parser.extract_reasoning(sample, _request())
    if not isinstance(answer, tuple) or [text for text in answer if not isinstance(text, str | None)]:
        raise _Flaw(f"extract_reasoning returned {answer!r}, no pair of texts")
    reasoning, content = answer
    parts = ("", "") if own else (_THOUGHT, _ANSWER)
    if known and not (reasoning and content and parts[0] in reasoning and parts[1] in content):
        raise _Flaw(f"extract_reasoning makes {answer!r} of {sample!r}")
    streamed = _streamed(kind(tokenizer, model_config=None), sample, tokenizer)
    if known and _words(streamed) != _words(answer):
        raise _Flaw(f"extract_reasoning_streaming makes {streamed!r} of {sample!r}, not {answer!r}")
    ids = tokenizer.encode(sample, add_special_tokens=False)
    if known and not parser.is_reasoning_end(ids):
        raise _Flaw(f"is_reasoning_end says no at the end of {sample!r}")
    parser.extract_content_ids(ids)


def _streamed(parser: Any, sample: str, tokenizer: Any) -> tuple[str, str]:  # noqa: ANN401
    deltas = list(_stream(parser.extract_reasoning_streaming, sample, tokenizer))
    return "".join(delta.reasoning or "" for delta in deltas), "".join(
        delta.content or "" for delta in deltas
    )


def _try_tool(plugin: Plugin, tokenizer: Any) -> None:  # noqa: ANN401
    from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation

    register_parser(plugin)
    kind = load_class(plugin)
    request = _request(tools=[_TOOL])
    own = getattr(kind, SAMPLE, None)
    for sample in (*_FOREIGN, *([own] if own else [])):
        found = kind(tokenizer, request.tools).extract_tool_calls(sample, request)
        if not isinstance(found, ExtractedToolCallInformation):
            raise _Flaw(f"extract_tool_calls returned {found!r}, no ExtractedToolCallInformation")
        if sample == _ANSWER and (found.tools_called or found.content != _ANSWER):
            raise _Flaw(f"extract_tool_calls makes {found!r} of {sample!r}, which calls nothing")
        if sample == own:
            _check_calls(found.tools_called, [call.function.arguments for call in found.tool_calls], own)
    for sample in filter(None, (_ANSWER, own)):
        streaming = kind(tokenizer, request.tools).extract_tool_calls_streaming
        deltas = list(_stream(streaming, sample, tokenizer, request=request))
        if sample == own:
            _check_calls(any(delta.tool_calls for delta in deltas), [], own)


def _check_calls(called: bool, arguments: list[str], sample: str) -> None:  # noqa: FBT001
    if not called:
        raise _Flaw(f"no call of a tool is found in {sample!r}")
    for text in arguments:
        try:
            json.loads(text)
        except ValueError:
            raise _Flaw(f"the arguments found in {sample!r} are not JSON: {text!r}") from None


def _try_model(plugin: Plugin) -> None:
    from torch import nn
    from vllm.model_executor.models.registry import _ModelInfo

    kind = load_class(plugin)
    if not issubclass(kind, nn.Module):
        raise _Flaw("is no torch.nn.Module")
    if not is_model(_ModelInfo.from_model_cls(kind)):
        raise _Flaw("vLLM finds no model in it: neither text generation, nor pooling, nor transcription")


def _stream(method: Callable[..., Any], text: str, tokenizer: Any, **more: Any) -> Iterator[Any]:  # noqa: ANN401
    """Feed a text to a parser token by token, as it is generated."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage

    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    for end in range(1, len(ids) + 1):
        before, now = texts[end - 1], texts[end]
        delta = method(before, now, now[len(before) :], ids[: end - 1], ids[:end], ids[end - 1 : end], **more)
        if delta is None:
            continue
        if not isinstance(delta, DeltaMessage):
            raise _Flaw(f"{method.__name__} returned {delta!r}, no DeltaMessage")
        yield delta


def _request(**more: Any) -> Any:  # noqa: ANN401
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        model="any", messages=[{"role": "user", "content": "What is two and two?"}], **more
    )


def _words(texts: Any) -> list[list[str]]:  # noqa: ANN401
    """Texts without their white space, which parsers treat each in their own way."""
    return [(text or "").split() for text in texts]


def _method(error: BaseException) -> str:
    """The outermost function of the plugin that `error` went through."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_name} " if trace else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
