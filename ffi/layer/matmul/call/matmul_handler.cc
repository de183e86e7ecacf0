// XLA FFI -> LaunchMatmul.

#include <optional>
#include <string>

#include "core/status.h"
#include "layer/matmul/call/kept.h"
#include "layer/matmul/call/load_matmuls.h"
#include "layer/matmul/kernels.h"
#include "layer/matmul/matmul_call.h"
#include "p2p/call/read_call.h"
#include "xla/attributes.h"
#include "xla/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep::matmul {

// By the names that Python sets.
struct MatmulAttributes {
  MatmulForm form;
  bool zeroes_unused;
};

}  // namespace jax_ep::matmul

JAX_EP_REGISTER_ENUM_ATTRIBUTE(::jax_ep::matmul::MatmulForm, "grouped_matmul: form", 3);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_ep::matmul::MatmulAttributes,
                                      StructMember<::jax_ep::matmul::MatmulForm>("form"),
                                      StructMember<bool>("zeroes_unused"));

namespace jax_ep::matmul {
namespace {

std::optional<Element> ToElement(ffi::DataType type) {
  if (type == ffi::BF16) return Element::kBFloat16;
  if (type == ffi::F16) return Element::kFloat16;
  if (type == ffi::F8E4M3FN) return Element::kE4m3;
  return std::nullopt;
}

Status ReadTypes(const BufferReader& operands, const BufferReader& results, MatmulCall* call) {
  const std::optional<Element> element = ToElement(operands.Type(0));
  if (!element.has_value()) {
    return InvalidArgument(std::string("lhs must be bfloat16, float16 or float8_e4m3fn; got ") +
                           Name(operands.Type(0)));
  }
  const std::optional<RowType> out_type = ToRowType(results.Type(0));
  if (!out_type.has_value()) {
    return InvalidArgument(std::string("the result must be bfloat16, float16 or float32; got ") +
                           Name(results.Type(0)));
  }
  call->element = *element;
  call->out_type = *out_type;
  return {};
}

Status ReadSizes(const BufferReader& operands, MatmulCall* call) {
  call->n_rows = operands.Dim(0, 0);
  call->k = operands.Dim(0, 1);
  call->n_groups = operands.Dim(2, 0) - 1;
  const size_t n_axis = call->form == MatmulForm::kWeights ? 2 : 1;
  call->n = operands.Dim(1, n_axis);
  if (call->n_groups < 0) {
    return InvalidArgument("row_offsets must have one more entry than there are groups; got none");
  }
  return {};
}

Shape RhsShape(const MatmulCall& call) {
  switch (call.form) {
    case MatmulForm::kWeights:
      return {call.n_groups, call.k, call.n};
    case MatmulForm::kTransposedWeights:
      return {call.n_groups, call.n, call.k};
    case MatmulForm::kRows:
      return {call.n_rows, call.n};
  }
  return {};
}

// Returns what the result holds before the call, if `has_kept`.
const void* ReadBuffers(bool has_kept, BufferReader& operands, BufferReader& results,
                        MatmulCall* call) {
  const ffi::DataType type = ToDataType(call->element, /*is_packed=*/false);
  const bool is_rows = call->form == MatmulForm::kRows;
  call->lhs = operands.Next("lhs", type, {call->n_rows, call->k});
  call->rhs = operands.Next("rhs", type, RhsShape(*call));
  call->row_offsets = operands.Next<uint32_t>("row_offsets", {call->n_groups + 1});
  call->lhs_scales = call->rhs_scales = nullptr;
  if (call->element == Element::kE4m3) {
    const int64_t k_blocks = call->k / kMatmulScaleBlock;
    const int64_t n_blocks = (call->n + kMatmulScaleBlock - 1) / kMatmulScaleBlock;
    call->lhs_scales = operands.Next<float>("lhs_scales", {k_blocks, call->n_rows});
    call->rhs_scales = operands.Next<float>("rhs_scales", {call->n_groups, n_blocks, k_blocks});
  }
  const Shape out_shape =
      is_rows ? Shape{call->n_groups, call->k, call->n} : Shape{call->n_rows, call->n};
  const ffi::DataType out_type = call->accumulates ? ffi::F32 : results.Type(0);
  const void* const kept =
      has_kept ? operands.Next("the result so far", out_type, out_shape) : nullptr;
  operands.ExpectEnd("operands");
  call->out = results.Next("the result", out_type, out_shape);
  call->workspace_bytes = MatmulWorkspaceBytes(call->n_groups);
  call->workspace =
      results.Next("workspace", ffi::U8, {static_cast<int64_t>(call->workspace_bytes)});
  results.ExpectEnd("results");
  return kept;
}

// Operands: lhs, rhs, row_offsets [L + 1], and for codes lhs_scales, rhs_scales; without scales,
// perhaps what the result holds before: in the form kRows, an accumulator, in the others, rows of
// other groups. Results: the product, the workspace. `*kept` is null if nothing is kept.
Status ReadMatmul(const MatmulAttributes& attributes, const BufferList& operands,
                  const BufferList& results, MatmulCall* call, const void** kept) {
  Status status;
  BufferReader operand_reader(operands, status), result_reader(results, status);
  call->form = attributes.form;
  call->zeroes_unused = attributes.zeroes_unused;
  status = ReadTypes(operand_reader, result_reader, call);
  const bool has_kept = call->element != Element::kE4m3 && operands.size() > 3;
  call->accumulates = call->form == MatmulForm::kRows && has_kept;
  if (status.ok()) status = ReadSizes(operand_reader, call);
  *kept = nullptr;
  if (status.ok()) *kept = ReadBuffers(has_kept, operand_reader, result_reader, call);
  BufferList read_only = operands;
  if (has_kept && *kept == call->out) read_only.TakeLast(1);
  if (status.ok()) status = CheckDisjoint(read_only, results);
  if (!status.ok()) status.message = "grouped_matmul: " + status.message;
  return status;
}

ffi::Error MatmulImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      const MatmulAttributes& attributes) {
  MatmulCall call{};
  const void* kept = nullptr;
  const Status status =
      ReadMatmul(attributes, BufferList(operands), BufferList(results), &call, &kept);
  if (!status.ok()) return ToError(status);
  const auto n_bytes = static_cast<size_t>(call.out_elements() * ElementBytes(call.out_type));
  cudaError_t error = Keep(kept, call.out, n_bytes, stream);
  if (error == cudaSuccess) error = LaunchMatmul(call, stream);
  return p2p::ToError(error, "grouped_matmul");
}

ffi::Error UseMatmuls(ffi::Dictionary) {
  return p2p::ToError(MatmulLoader::Instance().Use(), "loading the kernels of matmuls");
}

}  // namespace
}  // namespace jax_ep::matmul

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaMatmul, jax_ep::matmul::MatmulImpl,
                              jax_ep::p2p::BindLayerCall<jax_ep::matmul::MatmulAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

namespace jax_ep::matmul {

// The stage "instantiate" of all targets of matmuls, which XLA runs as it compiles or loads a
// program. The stage "initialize", which it runs before each run of a program on a device, would
// know the types of operands. But where XLA fuses a call with slices of its operands, some versions
// then look for these among the buffers of the program, by the indices that they have in the
// fusion.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUseMatmuls, UseMatmuls, ffi::Ffi::BindInstantiate().Attrs());

static const Target kMatmul("jax_ep_grouped_matmul", CudaMatmul, CudaUseMatmuls);

}  // namespace jax_ep::matmul
