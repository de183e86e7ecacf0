#include "tests/nvshmem/rail_loopback.h"

#include "nvshmem/plan/rail_sum_calls.h"

namespace jax_ep::p2p {
namespace {

using rail::LaunchKernel;
using rail::RailCall;
using rail::RailCombineCall;
using rail::RailSumCall;

constexpr int kRank = 0, kNode = 0;

}  // namespace

RailLoopback::RailLoopback(const Fixture<BFloat16>& fixture, const std::string& fatbin, Mode mode)
    : fixture_(fixture),
      mode_(mode),
      n_tokens_(fixture.sizes.max_tokens / kNodes),
      map_(rail::RailExchange::Plan(kNodes, fixture.config.token_bytes)),
      heap_(map_.bytes),
      all_(fixture.config.token_bytes * fixture.sizes.max_tokens),
      mask_(fixture.sizes.max_tokens),
      state_(1),
      peers_(kNodes),
      arrived_(fixture.sizes.max_tokens) {
  CHECK_EQ(fixture.sizes.n_ranks, 1);
  CHECK_EQ(fixture.sizes.max_tokens % kNodes, 0);
  CHECK_CUDA(cudaMemset(heap_.get(), 0, heap_.size()));
  CHECK_CUDA(cudaMemset(state_.get(), 0, sizeof(rail::RailState)));
  mask_.Write(std::vector<uint8_t>(mask_.size(), 1));
  peers_.Write(std::vector<rail::Peer>(kNodes, {heap_.get(), /*pe=*/0}));
  CHECK_CUDA(
      cudaLibraryLoadFromFile(&code_, fatbin.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  constexpr int kType = static_cast<int>(kRowType<BFloat16>);
  Check(rail::FindKernel(code_, rail::kExchangeKernel, &exchange_));
  Check(rail::FindKernel(code_, rail::kCombineKernels[kType], &combine_));
  Check(rail::FindKernel(code_, rail::kSumKernels[kType], &sum_));
  CHECK_CUDA(side_.Make());
  CHECK_CUDA(cudaDeviceSynchronize());
}

RailLoopback::~RailLoopback() {
  cudaEventDestroy(side_.fork);
  cudaEventDestroy(side_.join);
  cudaStreamDestroy(side_.stream);
  cudaLibraryUnload(code_);
}

LaunchPlan RailLoopback::Launch(DispatchArgs args) {
  const bool is_serial = mode_ == Mode::kSerial;
  const int64_t row_bytes = args.size.given * int64_t{kVectorBytes};
  RailCall rail =
      MakeCall(row_bytes, is_serial ? 1 : rail::RangesPerNode(kNodes, /*is_async=*/false));
  rail.rows = {args.tokens, all_.get(), row_bytes, /*by_node=*/false};
  args.tokens = all_.get();
  cudaStream_t stream = fixture_.streams[kRank];
  if (!is_serial) {
    rail.skips_own = true;
    rail.arrived = arrived_.get();
    CHECK_CUDA(
        cudaMemsetAsync(arrived_.get(), 0, kNodes * rail.tiles.n_tiles * sizeof(uint32_t), stream));
  }
  if (mode_ == Mode::kOverlapped) {
    LaunchOverlapped(rail, &args);
    return args.call.plan;
  }
  LaunchExchange(rail, stream);
  if (!is_serial) return {};
  fixture_.Launch(kRank, args);
  return args.call.plan;
}

LaunchPlan RailLoopback::Launch(CombineArgs args) {
  const int64_t row_bytes = args.row_vectors * int64_t{kVectorBytes};
  RailCall rail = MakeCall(row_bytes, /*n_ranges=*/1);
  rail.rows = {static_cast<const uint8_t*>(args.out), all_.get(), row_bytes, /*by_node=*/true};
  if (mode_ == Mode::kOverlapped) {
    LaunchOverlapped(rail, &args);
    return args.call.plan;
  }
  if (mode_ == Mode::kSerial) fixture_.Launch(kRank, args);
  const RailSumCall call{rail, /*residual=*/nullptr, args.row_type};
  CHECK_CUDA(LaunchKernel(sum_, &call, rail::SumSmemBytes(rail), fixture_.streams[kRank]));
  return mode_ == Mode::kSerial ? args.call.plan : LaunchPlan{};
}

RailCall RailLoopback::MakeCall(int64_t row_bytes, int64_t n_ranges) const {
  RailCall call{};
  call.map = map_;
  call.tiles = map_.Cut(n_tokens_, row_bytes, /*n_choices=*/0, /*extra_bytes=*/0, n_ranges);
  call.heap = heap_.get();
  call.peers = peers_.get();
  call.state = state_.get();
  call.failures = fixture_.group->Failures(kRank);
  call.node = kNode;
  call.n_nodes = kNodes;
  call.mask = mask_.get();
  return call;
}

void RailLoopback::LaunchOverlapped(RailCall rail, DispatchArgs* args) {
  const bool fits = PlanDispatchOfArriving(
      fixture_.group->ResourcesOf(fixture_.config, kRank), args->size, /*is_async=*/false,
      rail::kBlocks, static_cast<int32_t>(rail.tiles.n_ranges * kNodes), &args->call);
  CHECK_EQ(fits, true);
  fixture_.dispatch_plan.Apply(&args->call.plan);
  args->arriving = {rail.arrived,
                    rail.rows.from,
                    kNode,
                    n_tokens_,
                    static_cast<int32_t>(rail.tiles.tile_rows),
                    static_cast<int32_t>(rail.tiles.n_tiles)};
  Fork([&](cudaStream_t side) {
    LaunchExchange(rail, side);
    fixture_.Launch(kRank, *args);
  });
}

void RailLoopback::LaunchOverlapped(RailCall rail, CombineArgs* args) {
  PlanSending(args);
  const RailCombineCall call{rail, *args};
  Fork([&](cudaStream_t side) {
    fixture_.Launch(kRank, *args);
    CHECK_CUDA(LaunchKernel(combine_, &call, rail::CombineSmemBytes(call), side));
  });
}

// An override of the blocks that send leaves those of the other kernel as they are.
void RailLoopback::PlanSending(CombineArgs* args) const {
  const ReturnSize size{args->row_vectors, /*reduce=*/true, /*has_scalars=*/false};
  const bool fits = PlanCombineSend(fixture_.group->ResourcesOf(fixture_.config, kRank), size,
                                    /*is_async=*/false, rail::kBlocks, kNodes, &args->call);
  CHECK_EQ(fits, true);
  LaunchPlan& plan = args->call.plan;
  PlanOverride override = fixture_.combine_plan;
  override.n_blocks = 0;
  override.Apply(&plan);
  plan.n_blocks = plan.n_send_blocks + plan.n_elsewhere;
}

void RailLoopback::LaunchExchange(const RailCall& call, cudaStream_t stream) const {
  CHECK_CUDA(LaunchKernel(exchange_, &call, 0, stream));
}

void RailLoopback::Fork(const std::function<void(cudaStream_t)>& launch) {
  CHECK_CUDA(side_.Fork(fixture_.streams[kRank], [&](cudaStream_t side) {
    launch(side);
    return cudaSuccess;
  }));
}

}  // namespace jax_ep::p2p
