// The kernels of transport `nvshmem` on one GPU, for benchmarks: this rank is node 0 of 2, and its
// own heap stands for node 1's. Data that it sends to node 1 then comes back as if from there, over
// the GPU's own memory instead of a link. NVSHMEM is not needed: stores reach all peers.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#include "nvshmem/plan/rail_call.h"
#include "nvshmem/plan/rail_sum_calls.h"
#include "nvshmem/world/launch.h"
#include "tests/p2p/p2p_fixture.h"

namespace jax_ep::p2p {

class RailLoopback {
 public:
  enum class Mode {
    kOverlapped,  // the exchange beside the intra-node call, as the transport does
    kSerial,      // one after the other
    kExchange,    // the exchange alone
  };
  static constexpr int kNodes = 2;

  // `fixture` has one rank, with the tokens of both nodes. `fatbin`: path of the kernels.
  RailLoopback(const Fixture<BFloat16>& fixture, const std::string& fatbin, Mode mode);
  ~RailLoopback();
  RailLoopback(const RailLoopback&) = delete;
  RailLoopback& operator=(const RailLoopback&) = delete;

  // Launch a call on both nodes' tokens, of which this rank has the first half; give the plan of
  // the intra-node part. The result of combine is `out` [T, H], or the first part of `all` if
  // the two do not run at once.
  LaunchPlan Launch(DispatchArgs args);
  LaunchPlan Launch(CombineArgs args);

  Mode mode() const { return mode_; }
  // Tokens of each node.
  int n_tokens() const { return n_tokens_; }
  // The results of an exchange that runs by itself: the tokens of all nodes, or the sums.
  DeviceArray<uint8_t>& all() { return all_; }

 private:
  // `row_bytes`: of the rows that are exchanged, in so many ranges, sent round robin.
  rail::RailCall MakeCall(int64_t row_bytes, int64_t n_ranges) const;
  void PlanSending(CombineArgs* args) const;
  void LaunchOverlapped(rail::RailCall rail, DispatchArgs* args);
  void LaunchOverlapped(rail::RailCall rail, CombineArgs* args);
  void LaunchExchange(const rail::RailCall& call, cudaStream_t stream) const;
  // Launches on a stream beside the fixture's.
  void Fork(const std::function<void(cudaStream_t)>& launch);

  const Fixture<BFloat16>& fixture_;
  const Mode mode_;
  const int n_tokens_;
  const rail::RailExchange map_;
  DeviceArray<uint8_t> heap_, all_, mask_;
  DeviceArray<rail::RailState> state_;
  DeviceArray<rail::Peer> peers_;
  DeviceArray<uint32_t> arrived_;
  cudaLibrary_t code_{};
  cudaKernel_t exchange_{}, combine_{}, sum_{};
  rail::Side side_;
};

}  // namespace jax_ep::p2p
