// XLA FFI -> the kernels of balance.h, which belong to no group and may be captured.

#include <cstdint>
#include <limits>
#include <string>

#include "p2p/balance/balance.h"
#include "p2p/call/read_call.h"

namespace jax_ep::p2p {
namespace {

// Sizes with which the kernels' indices fit.
Status CheckSizes(int64_t n, int64_t n_blocks, int64_t n_experts, int64_t n_ranks) {
  if (n <= std::numeric_limits<int32_t>::max() && n_blocks >= 1 && n_experts >= 1 && n_ranks >= 1 &&
      n_experts % n_ranks == 0 && BalanceSmemBytes(n_experts, n_ranks) <= kMaxBalanceSmemBytes) {
    return {};
  }
  return InvalidArgument(
      "balance: E must be a multiple of R, and E * (R + 32) at most " +
      std::to_string(kMaxBalanceSmemBytes / sizeof(int32_t)) + ", with at least one block; got " +
      std::to_string(n_experts) + " experts, " + std::to_string(n_ranks) + " ranks, " +
      std::to_string(n_blocks) + " blocks and " + std::to_string(n) + " choices");
}

// Operand: ids [n]. Results: counts [E], block_counts [n_blocks, E].
ffi::Error CountImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  CountChoicesArgs args{};
  Status status;
  const BufferList operand_list(operands), result_list(results);
  BufferReader operand_reader(operand_list, status), result_reader(result_list, status);
  args.n = operand_reader.Dim(0, 0);
  const int64_t n_experts = result_reader.Dim(0, 0), n_blocks = result_reader.Dim(1, 0);
  args.ids = operand_reader.Next<int32_t>("ids", {args.n});
  operand_reader.ExpectEnd("operands");
  args.counts = result_reader.Next<int32_t>("counts", {n_experts});
  args.block_counts = result_reader.Next<int32_t>("counts of blocks", {n_blocks, n_experts});
  result_reader.ExpectEnd("results");
  if (status.ok()) status = CheckSizes(args.n, n_blocks, n_experts, 1);
  if (!status.ok()) return ToError(status);
  args.n_blocks = static_cast<int32_t>(n_blocks);
  args.n_experts = static_cast<int32_t>(n_experts);
  return ToError(LaunchCountChoices(args, stream), "counting choices");
}

// Operands: the coordinate, ids [n], counts of blocks [n_blocks, E], counts [R, E]. Results: group
// ids [n], copies [R, B].
ffi::Error BalanceImpl(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       int32_t n_ranks_per_node, int32_t n_shared) {
  BalanceArgs args{};
  Status status;
  const BufferList operand_list(operands), result_list(results);
  BufferReader operand_reader(operand_list, status), result_reader(result_list, status);
  args.n = operand_reader.Dim(1, 0);
  const int64_t n_blocks = operand_reader.Dim(2, 0);
  const int64_t n_ranks = operand_reader.Dim(3, 0), n_experts = operand_reader.Dim(3, 1);
  const int64_t n_slots = result_reader.Dim(1, 1);
  args.coordinate = operand_reader.Next<int32_t>("coordinate", {});
  args.ids = operand_reader.Next<int32_t>("ids", {args.n});
  args.block_counts = operand_reader.Next<int32_t>("counts of blocks", {n_blocks, n_experts});
  args.counts = operand_reader.Next<int32_t>("counts", {n_ranks, n_experts});
  operand_reader.ExpectEnd("operands");
  args.group_ids = result_reader.Next<int32_t>("group ids", {args.n});
  args.copies = result_reader.Next<int32_t>("copies", {n_ranks, n_slots});
  result_reader.ExpectEnd("results");
  if (status.ok()) status = CheckSizes(args.n, n_blocks, n_experts, n_ranks);
  if (status.ok() && (n_ranks_per_node < 1 || n_ranks % n_ranks_per_node != 0 || n_shared < 0)) {
    status = InvalidArgument("balance: n_ranks_per_node must divide the number of ranks; got " +
                             std::to_string(n_ranks_per_node) + " of " + std::to_string(n_ranks));
  }
  if (!status.ok()) return ToError(status);
  args.n_blocks = static_cast<int32_t>(n_blocks);
  args.n_ranks = static_cast<int32_t>(n_ranks);
  args.n_experts = static_cast<int32_t>(n_experts);
  args.n_slots = static_cast<int32_t>(n_slots);
  args.n_ranks_per_node = n_ranks_per_node;
  args.n_shared = n_shared;
  return ToError(LaunchBalanceChoices(args, stream), "balancing choices");
}

auto Bind() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets();
}

}  // namespace

JAX_EP_DEFINE_TARGET("jax_ep_count_choices", CudaCountChoices, CountImpl, Bind(),
                     {ffi::Traits::kCmdBufferCompatible});
JAX_EP_DEFINE_TARGET("jax_ep_balance_choices", CudaBalanceChoices, BalanceImpl,
                     Bind().Attr<int32_t>("n_ranks_per_node").Attr<int32_t>("n_shared"),
                     {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_ep::p2p
