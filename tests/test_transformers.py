"""transformers on thdops: whatever way a batch is packed or padded, the model is the library's with eager attention.

The reference is the library's own model, attention, experts and loss, on the same documents as a right-padded batch.
"""

from __future__ import annotations

import copy
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'thdops[transformers]')")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import hf_packed_finetune  # noqa: E402
import train_packed_moe  # noqa: E402

from thdops.integrations.transformers import patch_router, register  # noqa: E402
from thdops.integrations.transformers.attention import attention_forward  # noqa: E402
from thdops.integrations.transformers.rows import sequences_of_mask  # noqa: E402

LENGTHS = (5, 11, 1, 8)
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def model_of(family: str, **settings: Any) -> Any:
    """A small random model, everything in it the library's."""
    sizes = dict(SIZES)
    if family in ("Olmoe", "FlexOlmo"):
        del sizes["head_dim"]
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **settings})
    torch.manual_seed(0)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, **implementations)
    return model.train()


def qwen(**settings: Any) -> Any:
    return model_of("Qwen3Moe", moe_intermediate_size=24, norm_topk_prob=True, **MOE, **settings)


def on_thdops(model: Any, patched: bool = False) -> Any:
    """A copy with the same weights."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("thdops")
    if patched:
        patch_router(model)
    return model


# --- the same documents, as batches of every kind -------------------------------------------------------------------------------


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    torch.manual_seed(len(lengths))
    return [torch.randint(1, SIZES["vocab_size"], (n,)) for n in lengths]


def padded(texts: list[Tensor], left: list[int] | None = None, length: int = 13) -> dict[str, Tensor]:
    """One document a row, `left[b]` padding before it."""
    tokens, mask = torch.zeros(2, len(texts), length, dtype=torch.long)
    for b, text in enumerate(texts):
        rows = slice(left[b] if left else 0, (left[b] if left else 0) + len(text))
        tokens[b, rows], mask[b, rows] = text, 1
    labels = tokens.masked_fill(mask == 0, -100)
    for b in range(len(texts)):
        labels[b, left[b] if left else 0] = -100  # what stands before a document predicts nothing
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def collated(texts: list[Tensor]) -> dict[str, Any]:
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return collator([{"input_ids": text.tolist()} for text in texts])


def positions_alone(texts: list[Tensor]) -> dict[str, Any]:
    return transformers.DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts])


def with_gaps(texts: list[Tensor], multiple: int = 4, tail: int = 3) -> dict[str, Any]:
    """Packed, each document's rows a multiple of four, and a tail."""
    sizes = [-(-len(text) // multiple) * multiple for text in texts]
    tokens, labels = torch.zeros(sum(sizes) + tail, dtype=torch.long), torch.full((sum(sizes) + tail,), -100)
    positions = torch.zeros_like(tokens)
    ends = torch.tensor([0, *sizes]).cumsum(0)
    for start, text in zip(ends.tolist(), texts, strict=False):
        rows = slice(start, start + len(text))
        tokens[rows], positions[rows], labels[start + 1 : rows.stop] = text, torch.arange(len(text)), text[1:]
    cu_seqlens = torch.tensor([0, *map(len, texts)]).cumsum(0).int()
    metadata = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "cu_seqlens_padded": ends.int()}
    return {"input_ids": tokens[None], "position_ids": positions[None], "labels": labels[None], **metadata}


def rows_packed(texts: list[Tensor]) -> dict[str, Any]:
    """Two rows of equal length, two documents in each: 5 + 8 and 11 + 1 + a filler of their own that no label asks for."""
    first, second = torch.cat((texts[0], texts[3])), torch.cat((texts[1], texts[2], torch.tensor([7])))
    positions = torch.stack([torch.cat([torch.arange(n) for n in (5, 8)]), torch.cat([torch.arange(n) for n in (11, 1, 1)])])
    labels = torch.stack((first, second))
    labels[0, [0, 5]] = labels[1, [0, 11, 12]] = -100
    return {"input_ids": torch.stack((first, second)), "position_ids": positions, "labels": labels}


BATCHES: dict[str, Callable[[list[Tensor]], dict[str, Any]]] = {
    "collated": collated,
    "positions alone": positions_alone,
    "positions alone, few sequences": lambda texts: {**positions_alone(texts), "max_seqs": 4},
    "gaps and tail": with_gaps,
    "right-padded": padded,
    "left-padded": lambda texts: padded(texts, [13 - len(text) for text in texts]),
    "padded on both sides": lambda texts: padded(texts, [2, 0, 7, 1]),
}


def token_rows(batch: dict[str, Any]) -> Tensor:
    """The flat rows of the batch that hold the documents' tokens, in their order (tokens are not 0, padding is)."""
    return batch["input_ids"].flatten().nonzero().flatten()


def run(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients by name)."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[Any, dict[str, Tensor]], reference: tuple[Any, dict[str, Tensor]], what: str = "") -> None:
    (out, gradients), (expected, expected_gradients) = ours, reference
    torch.testing.assert_close(out.loss, expected.loss, **TOLERANCE)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], **TOLERANCE, msg=lambda text, n=name: f"{what}{n}: {text}")


@pytest.fixture(scope="module")
def library() -> Any:
    return qwen()


@pytest.fixture(scope="module")
def expected(library: Any) -> tuple[Any, dict[str, Tensor]]:
    return run(library, padded(documents()))


@pytest.mark.parametrize("patched", [False, True], ids=["attention", "attention and router"])
@pytest.mark.parametrize("kind", BATCHES)
def test_logits_losses_and_gradients_are_the_library_s(library: Any, expected: Any, kind: str, patched: bool) -> None:
    batch = BATCHES[kind](documents())
    if not patched and kind == "gaps and tail":
        batch["attention_mask"] = (batch["input_ids"] != 0).long()  # the library's own loss counts what it marks
    ours = run(on_thdops(library, patched), batch)
    vocabulary = SIZES["vocab_size"]
    logits = ours[0].logits.view(-1, vocabulary)[token_rows(batch)]
    reference = expected[0].logits.view(-1, vocabulary)[token_rows(padded(documents()))]
    torch.testing.assert_close(logits, reference, **TOLERANCE)
    torch.testing.assert_close(ours[0].aux_loss, expected[0].aux_loss, **TOLERANCE)
    assert_same(ours, expected)


@pytest.mark.parametrize("positions", [True, False])
def test_batches_without_padding(library: Any, positions: bool) -> None:
    """Rows are packed by their own positions, and are one sequence each where none are given."""
    batch = rows_packed(documents())
    if not positions:
        del batch["position_ids"]
    assert_same(run(on_thdops(library, patched=True), batch), run(library, batch))


def test_a_row_s_positions_may_go_on_from_the_row_before(library: Any) -> None:
    batch = {"input_ids": torch.randint(1, 61, (2, 6)), "position_ids": torch.arange(12).view(2, 6)}
    torch.testing.assert_close(on_thdops(library)(**batch).logits, library(**batch).logits, **TOLERANCE)


def test_checkpointed_layers_route_as_they_did(library: Any, expected: Any) -> None:
    """Two micro-batches in flight: each layer is recomputed with the padding of its own batch."""
    ours = on_thdops(library, patched=True)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    other = padded(documents((3, 3, 2)), length=7)
    outputs = [ours(**batch, use_cache=False) for batch in (with_gaps(documents()), other)]
    outputs[0].loss.backward()
    assert_same((outputs[0], {name: p.grad for name, p in ours.named_parameters()}), expected)


# --- padding ---------------------------------------------------------------------------------------------------------------------


def test_padding_rows_are_zero_and_what_stands_there_reaches_nothing() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    metadata = sequences_of_mask(3, 5, 5, attention_mask=mask)
    inputs = [torch.randn(3, heads, 5, 16) for heads in (4, 2, 2)]
    outputs, gradients = [], []
    for filling in (0.0, torch.nan):
        leaves = [torch.where(mask[:, None, :, None], x, filling).requires_grad_() for x in inputs]
        q, k, v = leaves
        out, _ = attention_forward(torch.nn.Module(), q, k, v, metadata)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.sum(), leaves))
    for clean, poisoned in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)
    for tensor in (outputs[1], *(gradient.transpose(1, 2) for gradient in gradients[1])):
        assert not tensor[~mask].any()
        assert not tensor[~mask].signbit().any()


def test_padding_chooses_no_expert(library: Any) -> None:
    ours = on_thdops(library, patched=True)
    batch = with_gaps(documents())
    seen: list[Tensor] = []
    ours.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out))
    ours(**batch, use_cache=False)
    padding = batch["input_ids"] == 0
    assert not seen[0][padding].any()
    assert seen[0][~padding].any(-1).all()


def test_rows_are_views_of_what_a_model_hands_over(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from thdops.integrations.transformers import attention as module

    copied: list[bool] = []
    called = module.attention_forward

    def watch(attention_module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **batch: Any) -> Any:
        copied.extend(x.transpose(1, 2).flatten(0, 1).data_ptr() != x.data_ptr() for x in (query, key, value))
        return called(attention_module, query, key, value, *rest, **batch)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "thdops", watch)
    on_thdops(library)(**padded(documents()), use_cache=False)
    assert copied == [False] * 6


# --- compiled --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaps and tail", "right-padded", "positions alone"])
def test_compiled_without_a_break_for_all_layouts(kind: str) -> None:
    """Two layouts of one capacity: one graph."""
    ours = on_thdops(qwen(num_hidden_layers=1), patched=True)
    # A function around the model: of a model itself, hooks are compiled apart, here the loss's few sums.
    compiled = torch.compile(lambda batch: ours(**batch, use_cache=False), fullgraph=True, backend="aot_eager", dynamic=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for lengths in (LENGTHS, (8, 5, 1, 11)):
        batch = BATCHES[kind](documents(lengths))
        output = compiled(batch)
        ours.zero_grad()
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in ours.named_parameters()}
        assert_same((output, gradients), run(ours, batch))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- what else the interface passes ----------------------------------------------------------------------------------------------

_LOCAL = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Mixtral", {"sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Gemma2", {"sliding_window": 3, "layer_types": _LOCAL, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4}),
        ("GptOss", {"sliding_window": 3, "layer_types": _LOCAL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_windows_softcap_and_sinks(family: str, settings: dict[str, Any]) -> None:
    library = model_of(family, **settings)
    if family == "GptOss":
        for layer in library.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    ours = on_thdops(library)
    reference = run(library, padded(documents()))
    for batch in (collated(documents()), padded(documents())):
        assert_same(run(ours, batch), reference, f"{family} ")


def test_attention_to_both_sides_with_a_window() -> None:
    """The library's window to both sides does not count the query's own key, its causal one does."""
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, is_causal=False, sliding_window=2)
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 2
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near)
    torch.testing.assert_close(out.transpose(1, 2), expected, **TOLERANCE)


def test_experts_with_biases_alone() -> None:
    library = model_of("GptOss", num_local_experts=4, num_experts_per_tok=2)
    ours = copy.deepcopy(library)
    for name, parameter in [*library.named_parameters()]:
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ours.load_state_dict(library.state_dict())
    ours.set_experts_implementation("thdops")
    batch = padded(documents())
    assert_same(run(ours, batch), run(library, batch))


# --- the router's patch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3Moe", {**MOE, "moe_intermediate_size": 16, "norm_topk_prob": False}),
        ("Qwen2Moe", {**MOE, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
        ("Olmoe", {**MOE, "norm_topk_prob": False}),
        ("FlexOlmo", {**MOE, "norm_topk_prob": True}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    ],
)
def test_patched_or_not_is_the_same(family: str, settings: dict[str, Any]) -> None:
    plain = on_thdops(model_of(family, **settings))
    patched = copy.deepcopy(plain)
    patch = patch_router(patched)
    batch = padded(documents())
    (output, gradients), (expected, expected_gradients) = run(patched, batch), run(plain, batch)
    assert patched.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(output.aux_loss, expected.aux_loss, **TOLERANCE)
    assert_same((output, gradients), (expected, expected_gradients), f"{family} ")
    loss, aux_loss, *_ = patched(**batch, use_cache=False, return_dict=False)
    torch.testing.assert_close(torch.stack((loss, aux_loss)), torch.stack((expected.loss, expected.aux_loss)), **TOLERANCE)
    del batch["labels"]
    aux_loss, logits, *_ = patched(**batch, use_cache=False, return_dict=False)
    torch.testing.assert_close(aux_loss, expected.aux_loss, **TOLERANCE)
    torch.testing.assert_close(logits, output.logits, **TOLERANCE)
    assert patched(**batch, use_cache=False, output_router_logits=False).aux_loss is None
    patch.remove()
    assert len(patched(**batch, use_cache=False).router_logits) == 2
    assert patched.config._experts_implementation == "eager"


def test_a_copy_of_a_patched_model_is_patched_by_itself(library: Any, expected: Any) -> None:
    ours = on_thdops(library, patched=True)
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert_same(run(other, with_gaps(documents())), expected)


# --- refusals --------------------------------------------------------------------------------------------------------------------

_OP = "thdops for transformers"


def _refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r"must") as caught:
        call()
    return str(caught.value)


def test_what_is_not_served_is_refused_by_name(library: Any) -> None:
    ours = on_thdops(library)
    tokens = torch.ones(2, 4, dtype=torch.long)
    hole = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])
    assert _refused(lambda: ours(input_ids=tokens, attention_mask=hole)) == (
        f"{_OP}: attention_mask must have its tokens side by side in each row, got a hole; pad left or right only"
    )
    assert _refused(lambda: ours(input_ids=tokens, attention_mask=torch.ones(2, 1, 4, 4))) == (
        f"{_OP}: attention_mask must be 2-D [B, S], got shape [2, 1, 4, 4]; say who sees whom with cu_seq_lens_q or position_ids"
    )
    cache = ours(input_ids=tokens, use_cache=True).past_key_values
    assert _refused(lambda: ours(input_ids=tokens[:, :1], past_key_values=cache)) == (
        f"{_OP}: past_key_values must be empty (queries and keys are the same rows), got 1 queries and 5 keys; pass use_cache=False"
    )
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32)
    assert _refused(lambda: ours(input_ids=tokens, cu_seq_lens_q=offsets)) == (
        f"{_OP}: input_ids must be [1, T] beside cu_seq_lens_q, got 2 rows; flatten the batch"
    )
    flat = tokens.view(1, 8)
    assert _refused(lambda: ours(input_ids=flat, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets[:2])) == (
        f"{_OP}: cu_seq_lens_k must be cu_seq_lens_q ([3]): a row is a query and a key, got shape [2]; pass the same offsets"
    )
    assert _refused(lambda: ours(input_ids=flat, cu_seqlens_padded=offsets)) == (
        f"{_OP}: cu_seqlens_padded must come with cu_seq_lens_q, got it alone; pass both"
    )
    kinds = (
        ("create_causal_mask", {"or_mask_function": lambda *_: True}),
        ("create_causal_mask", {"and_mask_function": lambda *_: True}),
        ("create_chunked_causal_mask", {}),
    )
    for make, settings in kinds:
        config = copy.deepcopy(ours.config)
        config.attention_chunk_size = 2
        create = getattr(transformers.masking_utils, make)
        arguments = {"inputs_embeds": torch.zeros(1, 8, 4), "attention_mask": None, "past_key_values": None}
        assert _refused(lambda create=create, config=config, rest={**arguments, **settings}: create(config, **rest)) == (
            f"{_OP}: the mask must be causal, windowed or full, got a pattern of the model's own (blocks, chunks, an overlay);"
            " use another attn_implementation"
        )
    q = torch.zeros(1, 2, 4, 16)
    assert "position_bias must be None, got a Tensor" in _refused(
        lambda: attention_forward(torch.nn.Module(), q, q, q, None, position_bias=q)
    )
    assert "dropout_p must be 0.0" in _refused(lambda: attention_forward(torch.nn.Module(), q, q, q, None, dropout=0.1))


def test_models_that_cannot_be_patched_are_refused(library: Any) -> None:
    assert _refused(lambda: patch_router(library)) == (
        "patch_router: model must have the attention implementation 'thdops', got eager; call"
        " model.set_attn_implementation('thdops') first"
    )
    dense = on_thdops(model_of("Gemma2", query_pre_attn_scalar=4))
    assert "must have routers of a known kind" in _refused(lambda: patch_router(dense))


def test_a_hole_that_the_host_cannot_see_makes_padding_of_all_rows() -> None:
    """As on a GPU: the host looks at a mask on the CPU only outside a compiled function."""
    mask = torch.tensor([[True, False, True], [True, True, True]])
    compiled: Any = torch.compile(lambda mask: sequences_of_mask(2, 3, 3, attention_mask=mask), fullgraph=True, backend="eager")
    assert compiled(mask).eq(-1).all()


# --- the example -----------------------------------------------------------------------------------------------------------------


def test_the_example_checks_itself(tmp_path: Path) -> None:
    sizes = {
        "steps": 3,
        "max-tokens": 96,
        "max-seqs": 6,
        "dim": 16,
        "layers": 1,
        "heads": 2,
        "kv-heads": 1,
        "experts": 3,
        "ffn": 16,
    }
    text = str(Path(sysconfig.get_paths()["stdlib"]) / "json")
    options = ["--device", "cpu", "--mode", "eager", "--data", text, "--out", str(tmp_path)]
    options += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert train_packed_moe.main(options, hf_packed_finetune.JOB) == 0
    checks = {check["name"] for check in json.loads((tmp_path / "summary.json").read_text())["checks"]}
    assert {"equals the library's eager model", "NaN in padding changes nothing", "padding rows exactly zero"} <= checks
