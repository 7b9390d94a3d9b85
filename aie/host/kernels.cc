// SPDX-License-Identifier: Apache-2.0
// The table of FlowNPU's kernels on the host.
#include "aie/kernels/kernels.h"

#include "aie/host/make_kernel.h"

namespace {
constexpr flownpu::aie_host::Kernel kKernels[] = {
    FLOWNPU_KERNEL(q4nx_dequant_bf16),
    FLOWNPU_KERNEL(q4nx_dequant_planes_bf16),
    FLOWNPU_KERNEL(gemm_bf16),
    FLOWNPU_KERNEL(zero_f32),
    FLOWNPU_KERNEL(add_f32),
    FLOWNPU_KERNEL(store_bf16),
    FLOWNPU_KERNEL(store_gelu),
    FLOWNPU_KERNEL(store_gelu_mul),
    FLOWNPU_KERNEL(store_silu_mul),
    FLOWNPU_KERNEL(fused_dqp_group_sums),
    FLOWNPU_KERNEL(fused_dqp_take),
    FLOWNPU_KERNEL(fused_dqp),
    FLOWNPU_KERNEL(flow_qkv_start),
    FLOWNPU_KERNEL(flow_qkv_scores),
    FLOWNPU_KERNEL(flow_qkv_values),
    FLOWNPU_KERNEL(flow_qkv_finish),
    FLOWNPU_KERNEL(flow_kv_start),
    FLOWNPU_KERNEL(flow_kv_scores),
    FLOWNPU_KERNEL(flow_kv_start_values),
    FLOWNPU_KERNEL(flow_kv_values),
    FLOWNPU_KERNEL(flow_kv_finish),
    FLOWNPU_KERNEL(flow_kv_split_start),
    FLOWNPU_KERNEL(flow_kv_split),
    FLOWNPU_KERNEL(flow_kv_split_int8),
    FLOWNPU_KERNEL(flow_kv_split_meet),
    FLOWNPU_KERNEL(flow_kv_split_give),
    FLOWNPU_KERNEL(flow_kv_split_store),
    FLOWNPU_KERNEL(attention_sinks),
    FLOWNPU_KERNEL(rms_norm),
    FLOWNPU_KERNEL(rms_norm_add),
    FLOWNPU_KERNEL(add_rms_norm),
    FLOWNPU_KERNEL(rope),
    FLOWNPU_KERNEL(rms_norm_rope),
    FLOWNPU_KERNEL(square_sums),
    FLOWNPU_KERNEL(all_norm_rope),
    FLOWNPU_KERNEL(copy_part),
    FLOWNPU_KERNEL(gated_delta),
    FLOWNPU_KERNEL(gated_part),
    FLOWNPU_KERNEL(copy_heads),
    FLOWNPU_KERNEL(copy_into),
    FLOWNPU_KERNEL(copy_norms),
    FLOWNPU_KERNEL(int8_rows),
    FLOWNPU_KERNEL(patch_pooling),
    FLOWNPU_KERNEL(patch_pooling_norm),
#if __AIE_ARCH__ >= 21
    FLOWNPU_KERNEL(q4nx_dequant_bfp16),
    FLOWNPU_KERNEL(q4nx_dequant_planes_bfp16),
    FLOWNPU_KERNEL(gemm_bfp16),
#endif
};
}  // namespace

FLOWNPU_EXPORT_KERNELS(kKernels)
