"""The roofline of a profiled step: every moment is one part's, and the losses add up to the step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

from kernels import EXPOSED, IDLE, PARTS, Kernel, attribute, category, without_waiting
from roofline import RATES, exposed_communication, ideal_ms, losses_ms, roofline_table

OTHER = "element-wise and other"
NAMES = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "GEMM",
    "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>": "GEMM",
    "cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "GEMM",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1": "attention",
    "fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 64, 128>": "attention",
    "aten::_fused_adamw_": "optimizer",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": OTHER,
    "triton_poi_fused_mul_silu_1": OTHER,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": OTHER,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>": OTHER,
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy PtoP (Device -> Device)": "communication",
    "gloo:all_reduce": "communication",
    "Memcpy DtoD (Device -> Device)": "copies",
    "Memset (Device)": "copies",
    "aten::mm": "GEMM",
    "aten::linear": OTHER,
    "void (anonymous namespace)::wait_signal_kernel(unsigned int**, unsigned int)": "waiting",
    "(anonymous namespace)::await_count(unsigned int const*, unsigned int, unsigned long long, unsigned int*)": "waiting",
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_kernels_are_known_by_their_names(name: str, expected: str):
    assert category(name) == expected


names = st.sampled_from([name for name in NAMES if "SendRecv" not in name])
kernels = st.builds(
    lambda name, start, length: Kernel(name, start, start + length), names, st.integers(-20, 90), st.integers(0, 40)
)


@settings(deadline=None)
@given(st.lists(kernels, max_size=12))
def test_parts_are_those_of_painting_every_nanosecond(found: list[Kernel]):
    begin, end = 0, 80
    painted, hidden = dict.fromkeys(PARTS, 0), 0
    for now in range(begin, end):
        running = {NAMES[k.name] for k in found if k.start <= now < k.end}
        compute = [part for part in ("GEMM", "attention", "optimizer", OTHER) if part in running]
        if compute:
            painted[compute[0]] += 1
            hidden += "communication" in running
        elif "communication" in running:
            painted[EXPOSED] += 1
        else:
            painted["copies" if "copies" in running else IDLE] += 1
    result = attribute(found, begin, end)
    assert dict(result.parts) == painted
    assert result.hidden == hidden
    assert sum(result.parts.values()) == end - begin


def test_a_receive_posted_early_waits_and_then_takes_as_long_as_others():
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    sends = [Kernel(name, 1000 * k, 1000 * k + 100) for k in range(4)]
    early = Kernel(name, 5000, 9000)
    other = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 9000)
    assert without_waiting([*sends, early, other]) == [*sends, replace(early, start=8900), other]
    parts = attribute([*sends, early], 0, 10_000).parts
    assert parts[EXPOSED] == 500
    assert parts[IDLE] == 9500


ROOFLINE = {
    "step_ns": [10_000_000, 12_000_000],
    "parts_ns": {part: [1_000_000, 1_000_000] for part in PARTS} | {"GEMM": [4_000_000, 6_000_000]},
    "hidden_ns": [500_000, 0],
    "gemm_flops": [2.0e12, 4.0e12],
    "attention_flops": [1e11, 3e11],
}


def test_losses_and_the_ideal_add_up_to_the_step():
    for rate in RATES.values():
        assert ideal_ms(ROOFLINE, rate) == pytest.approx(3.2e12 / rate * 1e3)
        assert ideal_ms(ROOFLINE, rate) + sum(losses_ms(ROOFLINE, rate).values()) == pytest.approx(11.0)
    assert losses_ms(ROOFLINE, 1e15)["GEMM"] == pytest.approx(5.0 - 3.0)
    assert exposed_communication(ROOFLINE) == pytest.approx((1.0, 1 / 11))


def test_the_table_says_where_each_millisecond_goes():
    rows = {row[0]: row[1:] for row in roofline_table(ROOFLINE)}
    assert rows["GEMM"][:4] == ["4.0", "6.0", "5.0", "45.5%"]
    assert rows["the step"][:4] == ["10.0", "12.0", "11.0", "100.0%"]
    assert rows["communication hidden"][:4] == ["0.5", "0.0", "0.2", "2.3%"]
    assert rows["GEMM TFLOP/s"][:3] == ["500", "667", "600"]
    assert {len(row) for row in rows.values()} == {6}
    # 3.2 TFLOPs are 3.24 ms at 989 TFLOP/s: of the 7.76 ms that are lost the idle one is 12.9%.
    assert rows["idle"][4] == "12.9%"
