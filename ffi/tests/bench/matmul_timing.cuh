// Operands of matmuls that are timed, and how chains of launches are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "tests/unit/matmul_case.cuh"

namespace jax_ep::matmul {

constexpr int kSets = 2;  // of operands and results, used round robin, so that caches do not help
constexpr int kLaunches = 10;  // of a chain
constexpr int kRounds = 15;    // chains of each matmul

// Normal numbers.
static __global__ void FillNormal(__nv_bfloat16* data, int64_t size, uint32_t seed) {
  for (int64_t i = ThreadIndex(); i < size; i += NumThreads()) {
    const float radius = sqrtf(-2 * logf(1 - Uniform(2 * i, seed)));
    data[i] = __float2bfloat16_rn(radius * cospif(2 * Uniform(2 * i + 1, seed)));
  }
}

// Weights of a model, [n_groups, k, n].
struct Model {
  const char* name;
  uint32_t n_groups;
  int64_t k, n;
};

// Calls time(model, operands, mean, is_drawn) for numbers of rows per group, drawn and equal, with
// Operands of each model, or of that which the first argument names.
template <class Operands, class Models, class Means, class Time>
void ForEachCase(const Models& models, const Means& means, int n_args, char** args,
                 const Time& time) {
  for (const Model& model : models) {
    if (n_args > 1 && std::string_view(args[1]) != model.name) continue;
    const Operands operands(model);
    for (const bool is_drawn : {true, false}) {
      for (const uint32_t mean : means) time(model, operands, mean, is_drawn);
    }
  }
}

inline std::vector<uint32_t> DrawOffsets(uint32_t n_groups, uint32_t mean, bool is_drawn) {
  std::vector<uint32_t> sizes(n_groups, is_drawn ? 0 : mean);
  std::mt19937 random(mean);
  for (uint32_t i = 0; is_drawn && i < n_groups * mean; ++i) ++sizes[random() % n_groups];
  std::vector<uint32_t> offsets = {0};
  for (const uint32_t size : sizes) offsets.push_back(offsets.back() + size);
  return offsets;
}

// What is timed is launched on this stream, which graphs can capture.
const cudaStream_t kTimedStream = cudaStreamPerThread;

// Launches that follow each other in a graph, so that none waits for the host.
class Chain {
 public:
  explicit Chain(const std::function<void(int set)>& launch) {
    cudaGraph_t graph;
    ExpectSuccess("cudaStreamBeginCapture",
                  cudaStreamBeginCapture(kTimedStream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kLaunches; ++i) launch(i % kSets);
    ExpectSuccess("cudaStreamEndCapture", cudaStreamEndCapture(kTimedStream, &graph));
    ExpectSuccess("cudaGraphInstantiate", cudaGraphInstantiate(&graph_, graph, 0));
    ExpectSuccess("cudaGraphDestroy", cudaGraphDestroy(graph));
    ExpectSuccess("cudaEventCreate", cudaEventCreate(&begin_));
    ExpectSuccess("cudaEventCreate", cudaEventCreate(&end_));
  }
  ~Chain() {
    cudaGraphExecDestroy(graph_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  // Of one launch.
  double Milliseconds() const {
    Launch();  // the one that is timed is queued behind it
    ExpectSuccess("cudaEventRecord", cudaEventRecord(begin_, kTimedStream));
    Launch();
    ExpectSuccess("cudaEventRecord", cudaEventRecord(end_, kTimedStream));
    ExpectSuccess("a chain of matmuls", cudaEventSynchronize(end_));
    float ms = 0;
    ExpectSuccess("cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin_, end_));
    return ms / kLaunches;
  }

 private:
  void Launch() const { ExpectSuccess("cudaGraphLaunch", cudaGraphLaunch(graph_, kTimedStream)); }

  cudaGraphExec_t graph_;
  cudaEvent_t begin_, end_;
};

// Milliseconds of one launch in a chain of them, without a graph, on the default stream.
inline double TimeChain(const std::function<void(int set)>& launch) {
  cudaEvent_t begin, end;
  ExpectSuccess("cudaEventCreate", cudaEventCreate(&begin));
  ExpectSuccess("cudaEventCreate", cudaEventCreate(&end));
  launch(kSets - 1);  // the chain is queued behind it
  ExpectSuccess("cudaEventRecord", cudaEventRecord(begin));
  for (int i = 0; i < kLaunches; ++i) launch(i % kSets);
  ExpectSuccess("cudaEventRecord", cudaEventRecord(end));
  ExpectSuccess("a chain of matmuls", cudaEventSynchronize(end));
  float ms = 0;
  ExpectSuccess("cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin, end));
  ExpectSuccess("cudaEventDestroy", cudaEventDestroy(begin));
  ExpectSuccess("cudaEventDestroy", cudaEventDestroy(end));
  return ms / kLaunches;
}

// The median of each, from rounds in random orders, since the power limit slows what follows.
inline std::vector<double> TimeRoundRobin(
    const std::vector<std::function<void(int set)>>& launches) {
  std::vector<std::unique_ptr<Chain>> chains;
  for (const auto& launch : launches) {
    launch(0);  // loads the kernels
    chains.push_back(std::make_unique<Chain>(launch));
  }
  std::vector<std::vector<double>> times(launches.size());
  std::vector<size_t> order(launches.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(1);
  for (int round = 0; round < kRounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) times[i].push_back(chains[i]->Milliseconds());
  }
  std::vector<double> medians;
  for (auto& of_one : times) {
    std::nth_element(of_one.begin(), of_one.begin() + kRounds / 2, of_one.end());
    medians.push_back(of_one[kRounds / 2]);
  }
  return medians;
}

}  // namespace jax_ep::matmul
