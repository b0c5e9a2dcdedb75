"""Markers of saved layers, and rejection of packed values by other loaders."""

from __future__ import annotations

import json

import pytest
import qao
import torch
from qao.nn import marker
from torch import Tensor, nn

every_scheme = pytest.mark.parametrize("kind", qao.schemes.SCHEMES.values(), ids=lambda kind: kind.word)


def make(kind: type[qao.Scheme], dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24, bias=False)).to(dtype)
    qao.quantize_(model, kind())
    return model


as_without_qao = nn.Module.load_state_dict.__wrapped__  # type: ignore[attr-defined]


@every_scheme
@pytest.mark.parametrize("strict", [True, False])
def test_a_plain_linear_refuses_it(kind: type[qao.Scheme], strict: bool) -> None:
    plain = nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24, bias=False))
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight") as raised:
        as_without_qao(plain, make(kind).state_dict(), strict=strict)
    assert not strict or '"0.pip_install_qao"' in str(raised.value)


@every_scheme
def test_schemes_as_data(kind: type[qao.Scheme]) -> None:
    scheme = kind()
    assert qao.schemes.scheme_from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_a_scheme_with_every_field_set() -> None:
    int4 = qao.Int8DynamicActivationInt4Weight(64, True, torch.float16, False, False)
    fp8 = qao.Float8StaticActivationFloat8Weight("tensor", activation_scale=0.25, fast_accum=True)
    for scheme in (int4, fp8):
        assert qao.schemes.scheme_from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@pytest.mark.parametrize(
    "content,message",
    [
        ({}, "None is not a scheme"),
        ({"scheme": "int3"}, "'int3' is not a scheme; use one of int4, "),
        ({"scheme": ["int4"]}, "is not a scheme"),
        ({"scheme": "int4", "granularity": "row"}, "int4 has no granularity; it has "),
        ({"scheme": "int4", "group_size": 48}, "group_size must be 32"),
        ({"scheme": "int4", "group_size": "32"}, "group_size must be 32"),
        ({"scheme": "int4", "scale_dtype": "load"}, "scale_dtype must be"),
        ({"scheme": "int8", "clip_search": 1}, "clip_search must be True or False"),
    ],
)
def test_what_is_no_scheme(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qao.schemes.scheme_from_dict(content)


@every_scheme
def test_the_marker_names_scheme_sizes_and_dtype(kind: type[qao.Scheme]) -> None:
    found = marker.decode(make(kind).state_dict()["0.pip_install_qao"])
    assert found == (kind().to_dict(), 40, 96, torch.bfloat16, None)


def changed(**fields: object) -> Tensor:
    content = json.loads(bytes(marker.encode(marker.Marker({"scheme": "int4"}, 8, 8, torch.float32)).tolist()))
    return torch.tensor(list(json.dumps(content | fields).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "tensor,message",
    [
        (changed(version=marker.VERSION + 1), "newer qao.*pip install -U qao"),
        (changed(version="1"), "not a marker"),
        (changed(scheme="int4"), "not a marker"),
        (changed(out_features=-1), "not a marker"),
        (changed(in_features=True), "not a marker"),
        (changed(dtype="load"), "not a marker"),
        (torch.tensor([255], dtype=torch.uint8), "not a marker"),
        (torch.tensor([91], dtype=torch.uint8), "not a marker"),
        (torch.tensor(list(b"[]"), dtype=torch.uint8), "not a marker"),
        (torch.zeros(0, dtype=torch.uint8), "not a marker"),
        (torch.zeros(1 << 17, dtype=torch.uint8), "not a marker"),
        (torch.zeros(4), "not a marker"),
    ],
)
def test_markers_that_are_none(tensor: Tensor, message: str) -> None:
    model = make(qao.Int4WeightOnly)
    state = model.state_dict() | {"0.pip_install_qao": tensor}
    with pytest.raises(RuntimeError, match=f"0.pip_install_qao: .*{message}"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "text", ["[" * 60_000, '{"version": ' + "9" * 5000 + "}", "[]", "{}"], ids=lambda text: text[:12]
)
def test_a_marker_that_json_cannot_read(text: str) -> None:
    with pytest.raises(ValueError, match="^x.pip_install_qao: not a marker of qao"):
        marker.decode(torch.tensor(list(text.encode()), dtype=torch.uint8), "x.pip_install_qao")


def test_no_layer_has_an_empty_name_and_a_dot() -> None:
    state = make(qao.Int8WeightOnly).state_dict()
    state[".pip_install_qao"] = state["0.pip_install_qao"]
    with pytest.raises(RuntimeError, match='Unexpected key.*".pip_install_qao"'):
        nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24, bias=False)).load_state_dict(state)


def test_a_scheme_that_does_not_exist_is_refused_with_its_layer() -> None:
    state = qao.QuantLinear.from_linear(nn.Linear(64, 16), qao.Int4WeightOnly(32)).state_dict()
    state = {f"0.{name}": value for name, value in state.items()}
    text = bytes(state["0.pip_install_qao"].tolist()).replace(b'"symmetric"', b'"sMmmetric"')
    spoilt = {"0.pip_install_qao": torch.tensor(list(text), dtype=torch.uint8)}
    for change, message in ((spoilt, "sMmmetric"), ({"0.scales": state["0.scales"].long()}, "scale_dtype must be")):
        with pytest.raises(RuntimeError, match=f"0.pip_install_qao: .*{message}"):
            nn.Sequential(nn.Linear(64, 16)).load_state_dict(state | change)
