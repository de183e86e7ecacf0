// Measures the links: every GPU stores to all others at the same time, first by a kernel with
// 16-byte stores, then by copy engines. Prints as JSON the GB/s that leave each GPU.
//
//   p2p_link DEVICES [MEGABYTES_PER_PAIR]

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kRepeats = 7, kThreads = 512, kUnroll = 8;

#define CHECK_CUDA(call)                                                  \
  do {                                                                    \
    const cudaError_t error = (call);                                     \
    if (error != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (false)

struct Targets {
  int4* to[8];
  int n;
};

__global__ void __launch_bounds__(kThreads)
    StoreToAll(const int4* from, const __grid_constant__ Targets targets, size_t n_vectors) {
  // Blocks alternate between the targets, so that all links are busy all the time.
  const int target = blockIdx.x % targets.n;
  const size_t block = blockIdx.x / targets.n, n_blocks = gridDim.x / targets.n;
  int4* const to = targets.to[target];
  constexpr size_t kStep = kThreads * kUnroll;
  for (size_t base = block * kStep; base < n_vectors; base += n_blocks * kStep) {
    int4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const size_t at = base + i * kThreads + threadIdx.x;
      if (at < n_vectors) values[i] = from[at];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const size_t at = base + i * kThreads + threadIdx.x;
      if (at < n_vectors) to[at] = values[i];
    }
  }
}

struct Gpu {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  int4* from;
  std::vector<int4*> inbox;  // by source
  std::vector<cudaStream_t> copies;
  int n_blocks;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Returns the median GB/s of the slowest GPU.
template <class Launch>
double Measure(std::vector<Gpu>& gpus, size_t bytes_per_gpu, const Launch& launch) {
  std::vector<double> rates;
  for (int repeat = 0; repeat < kRepeats + 1; ++repeat) {
    for (size_t i = 0; i < gpus.size(); ++i) {
      CHECK_CUDA(cudaSetDevice(static_cast<int>(i)));
      CHECK_CUDA(cudaEventRecord(gpus[i].begin, gpus[i].stream));
      launch(i);
      CHECK_CUDA(cudaEventRecord(gpus[i].end, gpus[i].stream));
    }
    double longest = 0;
    for (Gpu& gpu : gpus) {
      CHECK_CUDA(cudaEventSynchronize(gpu.end));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
      longest = std::max(longest, ms * 1e-3);
    }
    if (repeat > 0) rates.push_back(static_cast<double>(bytes_per_gpu) / longest * 1e-9);
  }
  return Median(rates);
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 2;
  const size_t bytes = static_cast<size_t>(argc > 2 ? std::atoi(argv[2]) : 512) << 20;
  std::vector<Gpu> gpus(n);
  for (int i = 0; i < n; ++i) {
    CHECK_CUDA(cudaSetDevice(i));
    Gpu& gpu = gpus[i];
    CHECK_CUDA(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreate(&gpu.begin));
    CHECK_CUDA(cudaEventCreate(&gpu.end));
    CHECK_CUDA(cudaDeviceGetAttribute(&gpu.n_blocks, cudaDevAttrMultiProcessorCount, i));
    CHECK_CUDA(cudaMalloc(&gpu.from, bytes));
    CHECK_CUDA(cudaMemset(gpu.from, i + 1, bytes));
    gpu.inbox.resize(n);
    gpu.copies.resize(n);
    for (int j = 0; j < n; ++j) {
      CHECK_CUDA(cudaMalloc(&gpu.inbox[j], bytes));
      CHECK_CUDA(cudaStreamCreateWithFlags(&gpu.copies[j], cudaStreamNonBlocking));
      if (j != i) CHECK_CUDA(cudaDeviceEnablePeerAccess(j, 0));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  const size_t sent = bytes * (n - 1);
  const double by_kernel = Measure(gpus, sent, [&](size_t i) {
    Targets targets{};
    for (int j = 1; j < n; ++j) targets.to[targets.n++] = gpus[(i + j) % n].inbox[i];
    const int n_blocks = gpus[i].n_blocks / targets.n * targets.n;
    StoreToAll<<<n_blocks, kThreads, 0, gpus[i].stream>>>(gpus[i].from, targets,
                                                          bytes / sizeof(int4));
    CHECK_CUDA(cudaGetLastError());
  });
  const double by_engines = Measure(gpus, sent, [&](size_t i) {
    Gpu& gpu = gpus[i];
    for (int j = 1; j < n; ++j) {
      const int to = static_cast<int>((i + j) % n);
      cudaEvent_t copied;
      CHECK_CUDA(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
      CHECK_CUDA(cudaStreamWaitEvent(gpu.copies[j], gpu.begin, 0));
      CHECK_CUDA(cudaMemcpyPeerAsync(gpus[to].inbox[i], to, gpu.from, static_cast<int>(i), bytes,
                                     gpu.copies[j]));
      CHECK_CUDA(cudaEventRecord(copied, gpu.copies[j]));
      CHECK_CUDA(cudaStreamWaitEvent(gpu.stream, copied, 0));
      CHECK_CUDA(cudaEventDestroy(copied));
    }
  });
  std::printf("{\"gb_s\": %.1f, \"gb_s_by_copy_engines\": %.1f, \"bytes_per_pair\": %zu}\n",
              by_kernel, by_engines, bytes);
  return 0;
}
