// XLA FFI -> the kernels of fp8_gradient.h, for which Python has chosen them.

#include <algorithm>
#include <cstdint>

#include "core/status.h"
#include "layer/matmul/call/hopper_call.h"
#include "layer/matmul/call/kept.h"
#include "layer/matmul/fp8_gradient.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"
#include "p2p/call/read_call.h"
#include "xla/buffers.h"

namespace jax_ep::matmul {

// By the names that Python sets: which codes are results.
struct QuantizeAttributes {
  bool along_rows;
  bool along_columns;
};

}  // namespace jax_ep::matmul

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::matmul::QuantizeAttributes,
                                      StructMember<bool>("along_rows"),
                                      StructMember<bool>("along_columns"));

namespace jax_ep::matmul {
namespace {

Status ExpectOffsets(int64_t n_groups) {
  if (n_groups >= 0) return {};
  return InvalidArgument("row_offsets must have one more entry than there are groups; got none");
}

RowCodes ReadCodes(BufferReader& results, const Shape& codes, const Shape& scales) {
  auto* const to = static_cast<uint8_t*>(results.Next("codes", ffi::F8E4M3FN, codes));
  return {to, results.Next<float>("scales", scales)};
}

// Operands: rows [C, n], of bfloat16 or codes, row_offsets [L + 1], and of codes, scales
// [n / 128, C]. Results: codes along rows [C, n] and their scales [n / 128, C]; those along columns
// [n, 128 B] and [B, n].
Status ReadQuantize(const QuantizeAttributes& attributes, const BufferList& operands,
                    const BufferList& results, QuantizeCall* call) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  const bool are_codes = operands.size() > 2;
  call->n_rows = operand_reader.Dim(0, 0);
  call->n = operand_reader.Dim(0, 1);
  call->n_groups = operand_reader.Dim(1, 0) - 1;
  if (status.ok()) status = ExpectOffsets(call->n_groups);
  if (!status.ok()) return status;
  const int64_t n_rows = call->n_rows, n = call->n;
  const Shape of_rows = {n / kMatmulScaleBlock, n_rows};
  call->rows = operand_reader.Next("rows", are_codes ? ffi::F8E4M3FN : ffi::BF16, {n_rows, n});
  call->row_offsets = operand_reader.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  call->scales = are_codes ? operand_reader.Next<float>("scales", of_rows) : nullptr;
  operand_reader.ExpectEnd("operands");
  if (attributes.along_rows) call->along_rows = ReadCodes(result_reader, {n_rows, n}, of_rows);
  if (attributes.along_columns) {
    const int64_t n_blocks = MaxRowBlocks(n_rows, call->n_groups);
    call->along_columns =
        ReadCodes(result_reader, {n, n_blocks * kMatmulScaleBlock}, {n_blocks, n});
  }
  result_reader.ExpectEnd("results");
  return status.ok() ? CheckDisjoint(operands, results) : status;
}

// Operands: codes along columns [k, 128 B] and [n, 128 B], row_offsets [L + 1], their scales [B, k]
// and [B, n]; perhaps an accumulator, of the result's type. Results: [L, k, n], the workspace.
// `*kept` is null if there is no accumulator.
Status ReadGradient(const BufferList& operands, const BufferList& results, MatmulCall* call,
                    const void** kept) {
  constexpr size_t kAccumulator = 5;
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  call->form = MatmulForm::kRows;
  call->element = Element::kE4m3;
  call->k = operand_reader.Dim(0, 0);
  call->n = operand_reader.Dim(1, 0);
  call->n_rows = operand_reader.Dim(0, 1);
  call->n_groups = operand_reader.Dim(2, 0) - 1;
  call->accumulates = operands.size() > kAccumulator;
  const ffi::DataType type = call->accumulates ? ffi::F32 : result_reader.Type(0);
  call->out_type = type == ffi::F32 ? RowType::kFloat32 : RowType::kBFloat16;
  if (status.ok()) status = ExpectOffsets(call->n_groups);
  if (!status.ok()) return status;
  const int64_t n_blocks = call->n_rows / kMatmulScaleBlock;
  const Shape out_shape = {call->n_groups, call->k, call->n};
  call->lhs = operand_reader.Next("lhs", ffi::F8E4M3FN, {call->k, call->n_rows});
  call->rhs = operand_reader.Next("rhs", ffi::F8E4M3FN, {call->n, call->n_rows});
  call->row_offsets = operand_reader.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  call->lhs_scales = operand_reader.Next<float>("lhs_scales", {n_blocks, call->k});
  call->rhs_scales = operand_reader.Next<float>("rhs_scales", {n_blocks, call->n});
  if (call->accumulates) *kept = operand_reader.Next("the result so far", type, out_shape);
  operand_reader.ExpectEnd("operands");
  const ffi::DataType out_type = type == ffi::F32 ? ffi::F32 : ffi::BF16;
  call->out = result_reader.Next("the result", out_type, out_shape);
  call->workspace_bytes = MatmulWorkspaceBytes(call->n_groups);
  call->workspace =
      result_reader.Next("workspace", ffi::U8, {static_cast<int64_t>(call->workspace_bytes)});
  result_reader.ExpectEnd("results");
  BufferList read_only = operands;
  if (call->accumulates && *kept == call->out) read_only.TakeLast(1);
  return status.ok() ? CheckDisjoint(read_only, results) : status;
}

Status ExpectKernel(bool takes_sizes) {
  if (Status status = ExpectHopper(); !status.ok()) return status;
  if (takes_sizes) return {};
  return InvalidArgument("no kernel takes so many rows or columns. Compile the program again");
}

ffi::Error QuantizeImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, const QuantizeAttributes& attributes) {
  QuantizeCall call{};
  Status status = ReadQuantize(attributes, BufferList(operands), BufferList(results), &call);
  const bool is_empty = std::min({call.n_rows, call.n_groups, call.n}) == 0;
  const bool takes_sizes = call.n % kMatmulScaleBlock == 0 && call.n_rows <= INT32_MAX;
  if (status.ok() && !is_empty) status = ExpectKernel(takes_sizes);
  return RunHopper("quantize_rows", status, is_empty,
                   [&] { return hopper::LaunchQuantizeRows(call, stream); });
}

ffi::Error GradientImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                        ffi::RemainingRets results) {
  MatmulCall call{};
  const void* kept = nullptr;
  Status status = ReadGradient(BufferList(operands), BufferList(results), &call, &kept);
  const bool is_empty = status.ok() && call.out_elements() == 0;
  const int64_t largest = std::max({call.n_rows, call.k, call.n});
  const bool takes_sizes = call.k % 8 == 0 && call.n % 8 == 0 && largest <= INT32_MAX;
  if (status.ok() && !is_empty) status = ExpectKernel(takes_sizes);
  return RunHopper("the gradient of weights in FP8", status, is_empty, [&] {
    const auto n_bytes = static_cast<size_t>(call.out_elements() * ElementBytes(call.out_type));
    const cudaError_t error = Keep(kept, call.out, n_bytes, stream);
    if (error != cudaSuccess) return error;
    return call.n_rows == 0 ? ZeroResult(call, stream) : hopper::LaunchCodesGradient(call, stream);
  });
}

}  // namespace
}  // namespace jax_ep::matmul

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaQuantizeRows, jax_ep::matmul::QuantizeImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::matmul::QuantizeAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCodesGradient, jax_ep::matmul::GradientImpl,
                              jax_ep::ffi::Ffi::Bind()
                                  .Ctx<jax_ep::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::matmul {

extern "C" XLA_FFI_Error* CudaUseMatmuls(XLA_FFI_CallFrame* call_frame);  // matmul_handler.cc

static const struct Fp8GradientTargets {
  Target quantize{"jax_ep_quantize_rows", CudaQuantizeRows, CudaUseMatmuls};
  Target gradient{"jax_ep_scaled_matmul_grad", CudaCodesGradient, CudaUseMatmuls};
}* const kFp8GradientTargets = HasHopperKernels() ? new Fp8GradientTargets : nullptr;

}  // namespace jax_ep::matmul
