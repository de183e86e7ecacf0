// XLA FFI -> the kernels of gated.h, for which Python has chosen them.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"
#include "layer/activation/read_silu.h"
#include "layer/matmul/call/hopper_call.h"
#include "layer/matmul/call/kept.h"
#include "layer/matmul/gated.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"
#include "p2p/call/read_call.h"
#include "xla/buffers.h"

namespace jax_ep::matmul {

// By the names that Python sets.
struct GatedAttributes {
  bool interleaved;
  bool clamped;
  float alpha;
  float limit;
  bool keeps_hidden;

  silu::Activation activation() const { return {clamped, alpha, limit}; }
};

}  // namespace jax_ep::matmul

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::matmul::GatedAttributes,
                                      StructMember<bool>("interleaved"),
                                      StructMember<bool>("clamped"), StructMember<float>("alpha"),
                                      StructMember<float>("limit"),
                                      StructMember<bool>("keeps_hidden"));

namespace jax_ep::matmul {
namespace {

// Results of the first groups, to which a call adds the rows of others. Null: there are none.
struct KeptResults {
  const void* values;  // or the gradient of hidden rows
  const void* hidden;

  // Whether the last operands share memory with the results, as they should: see Keep.
  bool AreResults(const void* out_values, const void* out_hidden) const {
    return values == out_values && (hidden == nullptr || hidden == out_hidden);
  }
};

// `n_axis` is of the weights; `offsets`, the operand with the row offsets.
Status ReadSizes(const BufferReader& operands, MatmulForm form, size_t n_axis, size_t offsets,
                 MatmulCall* call) {
  call->form = form;
  call->element = Element::kBFloat16;
  call->out_type = RowType::kBFloat16;
  call->n_rows = operands.Dim(0, 0);
  call->k = operands.Dim(0, 1);
  call->n = operands.Dim(1, n_axis);
  call->n_groups = operands.Dim(offsets, 0) - 1;
  if (call->n_groups >= 0) return {};
  return InvalidArgument("row_offsets must have one more entry than there are groups; got none");
}

void ReadWorkspace(BufferReader& results, MatmulCall* call) {
  call->workspace_bytes = MatmulWorkspaceBytes(call->n_groups);
  call->workspace =
      results.Next("workspace", ffi::U8, {static_cast<int64_t>(call->workspace_bytes)});
  results.ExpectEnd("results");
}

void ReadBuffers(bool has_bias, bool has_hidden, int n_kept, BufferReader& operands,
                 BufferReader& results, MatmulCall* call, Gate* gate, KeptResults* kept) {
  const Shape values_shape = {call->n_rows, call->n / 2}, hidden_shape = {call->n_rows, call->n};
  call->lhs = operands.Next("rows", ffi::BF16, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::BF16, {call->n_groups, call->k, call->n});
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  gate->bias = has_bias ? operands.Next("bias", ffi::BF16, {call->n_groups, call->n}) : nullptr;
  if (n_kept > 0) kept->values = operands.Next("the result so far", ffi::BF16, values_shape);
  if (n_kept > 1) kept->hidden = operands.Next("the hidden rows so far", ffi::BF16, hidden_shape);
  operands.ExpectEnd("operands");
  gate->values = results.Next("the result", ffi::BF16, values_shape);
  if (has_hidden) call->out = results.Next("the matmul's result", ffi::BF16, hidden_shape);
  ReadWorkspace(results, call);
}

void ReadScaledBuffers(bool has_bias, BufferReader& operands, BufferReader& results,
                       MatmulCall* call, Gate* gate) {
  const int64_t k_blocks = call->k / kMatmulScaleBlock, n_blocks = call->n / kMatmulScaleBlock;
  call->lhs = operands.Next("rows", ffi::F8E4M3FN, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::F8E4M3FN, {call->n_groups, call->n, call->k});
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  call->lhs_scales = operands.Next<float>("row_scales", {k_blocks, call->n_rows});
  call->rhs_scales = operands.Next<float>("weight_scales", {call->n_groups, n_blocks, k_blocks});
  gate->bias = has_bias ? operands.Next("bias", ffi::BF16, {call->n_groups, call->n}) : nullptr;
  operands.ExpectEnd("operands");
  gate->values = results.Next("codes", ffi::F8E4M3FN, {call->n_rows, call->n / 2});
  gate->scales = results.Next<float>("scales", {n_blocks / 2, call->n_rows});
  ReadWorkspace(results, call);
}

void ReadBuffers(bool has_room, bool has_kept, BufferReader& operands, BufferReader& results,
                 MatmulCall* call, GatedGradient* gradient, KeptResults* kept) {
  const Shape hidden_shape = {call->n_rows, 2 * call->n};
  call->lhs = operands.Next("the result's gradient", ffi::BF16, {call->n_rows, call->k});
  call->rhs = operands.Next("weights", ffi::BF16, {call->n_groups, call->n, call->k});
  gradient->hidden = operands.Next("hidden", ffi::BF16, hidden_shape);
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  if (has_kept) kept->values = operands.Next("the gradient so far", ffi::BF16, hidden_shape);
  operands.ExpectEnd("operands");
  gradient->of_hidden = results.Next("the gradient", ffi::BF16, hidden_shape);
  if (has_room) results.Next("the values' gradient", ffi::BF16, {call->n_rows, call->n});
  ReadWorkspace(results, call);
}

// That the results share memory with no operand but those that they keep.
Status ExpectDisjoint(BufferList operands, const BufferList& results, int n_kept,
                      bool are_results) {
  if (are_results) operands.TakeLast(static_cast<size_t>(n_kept));
  return CheckDisjoint(operands, results);
}

// Operands, of bfloat16: rows [C, k], weights [L, k, 2 F], row_offsets [L + 1]; if there is one,
// the bias [L, 2 F]; perhaps results with rows of other groups. Results: values [C, F]; the
// matmul's result [C, 2 F], with the bias, if it is kept; the workspace. Programs of earlier
// versions have room for that result where it is not kept.
Status ReadGated(const GatedAttributes& attributes, const BufferList& operands,
                 const BufferList& results, MatmulCall* call, Gate* gate, KeptResults* kept) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gate->is_interleaved = attributes.interleaved;
  gate->activation = attributes.activation();
  gate->keeps_hidden = attributes.keeps_hidden;
  status = ReadSizes(operand_reader, MatmulForm::kWeights, 2, 2, call);
  const bool has_hidden = gate->keeps_hidden || results.size() > 2;
  // Values have half as many columns as a bias.
  const size_t n_results = gate->keeps_hidden ? 2 : 1, n_others = operands.size() - 3;
  const bool has_kept = operands.size() >= 3 && n_others >= n_results &&
                        2 * operand_reader.Dim(operands.size() - n_results, 1) == call->n;
  const int n_kept = has_kept ? static_cast<int>(n_results) : 0;
  if (status.ok()) {
    ReadBuffers(operands.size() > 3 + n_kept, has_hidden, n_kept, operand_reader, result_reader,
                call, gate, kept);
  }
  if (status.ok()) {
    const bool are_results = kept->AreResults(gate->values, call->out);
    status = ExpectDisjoint(operands, results, n_kept, are_results);
  }
  return status;
}

// Operands: codes of rows [C, k] and of weights [L, 2 F, k], row_offsets [L + 1], the scales of
// rows [k / 128, C] and of weights [L, 2 F / 128, k / 128], biases? [L, 2 F] of bfloat16. Results:
// codes [C, F], their scales [F / 128, C], the workspace. F is a multiple of 128.
Status ReadGatedScaled(const silu::GateAttributes& attributes, const BufferList& operands,
                       const BufferList& results, MatmulCall* call, Gate* gate) {
  constexpr size_t kMinOperands = 5;
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gate->is_interleaved = attributes.interleaved;
  gate->activation = attributes.activation();
  status = ReadSizes(operand_reader, MatmulForm::kTransposedWeights, 1, 2, call);
  call->element = Element::kE4m3;
  if (status.ok()) {
    ReadScaledBuffers(operands.size() > kMinOperands, operand_reader, result_reader, call, gate);
  }
  if (status.ok()) status = CheckDisjoint(operands, results);
  return status;
}

// Operands, of bfloat16: the gradient of the second matmul's result [C, k], its weights [L, F, k],
// hidden rows [C, 2 F], row_offsets [L + 1]; perhaps the result with rows of other groups. Results:
// the gradient of the hidden rows, the workspace. Programs of earlier versions have room for that
// of the activation's result [C, F] between these.
Status ReadGatedGradient(const silu::GateAttributes& attributes, const BufferList& operands,
                         const BufferList& results, MatmulCall* call, GatedGradient* gradient,
                         KeptResults* kept) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  gradient->is_interleaved = attributes.interleaved;
  gradient->activation = attributes.activation();
  status = ReadSizes(operand_reader, MatmulForm::kTransposedWeights, 1, 3, call);
  const bool has_kept = operands.size() > 4;
  if (status.ok()) {
    ReadBuffers(results.size() > 2, has_kept, operand_reader, result_reader, call, gradient, kept);
  }
  if (status.ok()) {
    const bool are_results = kept->AreResults(gradient->of_hidden, nullptr);
    status = ExpectDisjoint(operands, results, has_kept, are_results);
  }
  return status;
}

// Multiples of which k and n must be.
struct Units {
  int64_t k, n;
};

// A program may have been compiled for another GPU, or by an earlier version, whose handlers chose.
Status ExpectKernel(const MatmulCall& call, const Units& units) {
  if (Status status = ExpectHopper(); !status.ok()) return status;
  const int64_t largest = std::max({call.n_rows, call.k, 2 * call.n});
  if (call.k > 0 && call.k % units.k == 0 && call.n % units.n == 0 && largest <= INT32_MAX &&
      call.n_groups <= hopper::kMaxTiledGroups) {
    return {};
  }
  return InvalidArgument("no kernel takes so many groups, or columns; got " +
                         std::to_string(call.n_groups) + " groups, k = " + std::to_string(call.k) +
                         " and n = " + std::to_string(call.n) + ". Compile the program again");
}

template <class Launch>
ffi::Error Run(const char* name, Status status, const MatmulCall& call, const Units& units,
               const Launch& launch) {
  const bool is_empty = std::min({call.n_rows, call.n_groups, call.n}) == 0;
  if (status.ok() && !is_empty) status = ExpectKernel(call, units);
  return RunHopper(name, status, is_empty, launch);
}

ffi::Error GatedImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                     const GatedAttributes& attributes) {
  MatmulCall call{};
  Gate gate{};
  KeptResults kept{};
  const Status status =
      ReadGated(attributes, BufferList(operands), BufferList(results), &call, &gate, &kept);
  return Run("gated_matmul", status, call, {8, 16}, [&] {
    const auto n_bytes = static_cast<size_t>(call.n_rows * call.n) * sizeof(uint16_t);
    cudaError_t error = Keep(kept.values, gate.values, n_bytes / 2, stream);
    if (error == cudaSuccess) error = Keep(kept.hidden, call.out, n_bytes, stream);
    return error == cudaSuccess ? hopper::LaunchGated(call, gate, stream) : error;
  });
}

ffi::Error GatedScaledImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, const silu::GateAttributes& attributes) {
  MatmulCall call{};
  Gate gate{};
  const Status status =
      ReadGatedScaled(attributes, BufferList(operands), BufferList(results), &call, &gate);
  return Run("gated_scaled_matmul", status, call, {kMatmulScaleBlock, 2 * kMatmulScaleBlock},
             [&] { return hopper::LaunchGatedScaled(call, gate, stream); });
}

ffi::Error GatedGradientImpl(cudaStream_t stream, ffi::RemainingArgs operands,
                             ffi::RemainingRets results, const silu::GateAttributes& attributes) {
  MatmulCall call{};
  GatedGradient gradient{};
  KeptResults kept{};
  const Status status = ReadGatedGradient(attributes, BufferList(operands), BufferList(results),
                                          &call, &gradient, &kept);
  return Run("gated_matmul's gradient", status, call, {8, 8}, [&] {
    const auto n_bytes = static_cast<size_t>(2 * call.n_rows * call.n) * sizeof(uint16_t);
    const cudaError_t error = Keep(kept.values, gradient.of_hidden, n_bytes, stream);
    return error == cudaSuccess ? hopper::LaunchGatedGradient(call, gradient, stream) : error;
  });
}

}  // namespace
}  // namespace jax_ep::matmul

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedMatmul, jax_ep::matmul::GatedImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::matmul::GatedAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedScaled, jax_ep::matmul::GatedScaledImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::silu::GateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaGatedGradient, jax_ep::matmul::GatedGradientImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::silu::GateAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::matmul {

extern "C" XLA_FFI_Error* CudaUseMatmuls(XLA_FFI_CallFrame* call_frame);  // matmul_handler.cc

// Calls with the activation. There are none without kernels for Hopper.
static const struct GatedTargets {
  Target matmul{"jax_ep_gated_matmul", CudaGatedMatmul, CudaUseMatmuls};
  Target scaled{"jax_ep_gated_scaled_matmul", CudaGatedScaled, CudaUseMatmuls};
  Target gradient{"jax_ep_gated_matmul_grad", CudaGatedGradient, CudaUseMatmuls};
}* const kGatedTargets = HasHopperKernels() ? new GatedTargets : nullptr;

}  // namespace jax_ep::matmul
