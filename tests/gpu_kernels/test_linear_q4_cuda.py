"""4-bit linears by warp groups on a GPU: the layers of 27B, in a graph of dependent launches, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from step_runners import compiled, on_gpu, pointers_of  # noqa: E402

from benchmarks.gpu.kernels.linear_cases import check_case, draw, order_columns, run_case  # noqa: E402
from wicore_trt.plugins import step_layout  # noqa: E402
from wicore_trt.plugins.aot import KernelSpec  # noqa: E402
from wicore_trt.plugins.dependent import IN_TURN  # noqa: E402
from wicore_trt.plugins.kernels.linear_specs import linear_spec  # noqa: E402
from wicore_trt.plugins.kernels.step_specs import order_spec  # noqa: E402
from wicore_trt.plugins.launch import SHARED_LAUNCHER  # noqa: E402
from wicore_trt.plugins.layout import Launch  # noqa: E402
from wicore_trt.plugins.linear_configs import groups_config  # noqa: E402
from wicore_trt.plugins.linear_layout import LinearShape  # noqa: E402
from wicore_trt.weight_format import Q4_0  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
LAYERS = ((8192, 5376, False), (5376, 4096, False), (21504, 5376, True), (5376, 21504, False))


def in_graph(spec: KernelSpec, call: Launch) -> None:
    """Launch twice in a graph, the second time before the first has ended."""
    kernel, call = compiled(spec), Launch(call.grid, pointers_of(call))
    front, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    on_gpu(spec, call)
    with torch.cuda.graph(graph):
        front.add_(1)
        for _ in range(2):
            SHARED_LAUNCHER.launch(kernel, call, torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_layers_of_27b(layer: tuple[int, int, bool], columns: int) -> None:
    """Also: a row has the same bits in whatever company, and NaN in other rows reaches none."""
    n, k, geglu = layer
    shape = LinearShape(n, k, "bfloat16", Q4_0, "bfloat16" if geglu else "float32", False, geglu)
    config = groups_config("sm90", shape, columns)
    assert config is not None and config.columns == columns
    spec = linear_spec(shape, config, "sm90")
    case = draw(shape, columns, "cuda")
    share = check_case(case, config, replace(spec, name=spec.name + "_in_turn", dependent=IN_TURN), in_graph)
    print(f"{layer} {columns} rows: error {share:.2f} of what is allowed")
    whole, few = run_case(case, config, spec, on_gpu), columns // 2 + 1
    x = case.x[: few + 2].clone()
    x[few:] = math.nan
    alone = run_case(replace(case, tokens=few, x=x), config, spec, on_gpu)
    assert torch.equal(alone[:few], whole[:few])
    x = case.x.clone()
    x[few:] = math.nan
    poisoned = run_case(case.with_x(x), config, spec, on_gpu)
    assert torch.equal(poisoned[:few], whole[:few])


def test_columns_are_ordered() -> None:
    x = torch.randn(17, 4096, device="cuda").bfloat16()
    out, spec = torch.full_like(x, math.nan), order_spec(4096, "bfloat16")
    on_gpu(spec, step_layout.order_launch(spec.constants, x, out, 17))
    assert torch.equal(out, order_columns(x))
