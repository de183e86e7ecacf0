// Tests of the p2p kernels without JAX: results are compared in bits with p2p_reference.h.
//
//   p2p_test cases RANKS DEVICES N_CASES [SEED [SECONDS]]
//       random sizes, routings and modes, until SECONDS have passed; case i has the seed SEED + i
//   p2p_test formats RANKS DEVICES N_CASES [SEED [SECONDS]]
//       the same for dispatch with token formats, compared with the host's encoder
//   p2p_test large RANKS DEVICES TOKENS [SMS]
//       H = 7168, 256 groups, 8 choices
//   p2p_test replay RANKS DEVICES N_REPLAYS [SECONDS]
//       captured graphs, until SECONDS have passed
//   p2p_test fail RANKS DEVICES
//       a rank stays away
//   p2p_test tampered RANKS DEVICES [LIMIT_MS [STRIDE]]
//       results of dispatch that are changed before combine; the calls' time limit; every so many
//   p2p_test changing RANKS DEVICES [LIMIT_MS [ROUNDS]]
//       operands that another stream writes during calls; the calls' time limit
//   p2p_test processes RANKS DEVICES PROCESSES N_CASES [SEED]
//       `cases` and `fail` with ranks in several processes; then one of them exits
//
// Ranks are spread evenly over the devices 0 to DEVICES - 1, and over the processes. `cases`,
// `formats` and `replay` print now and then how far they are.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/p2p/p2p_calls.h"
#include "tests/p2p/p2p_cases.h"
#include "tests/p2p/p2p_changing.h"
#include "tests/p2p/p2p_missing.h"
#include "tests/p2p/p2p_replay.h"
#include "tests/p2p/p2p_tampered.h"

namespace jax_ep::p2p {
namespace {

// Large enough for the plans of many tokens.
void RunLarge(int n_ranks, const std::vector<int>& devices, int n_tokens, int n_sms) {
  std::mt19937 random(7);
  const CaseSizes sizes{n_ranks, 256, 8, n_tokens, 7168, n_tokens * 8 * 3};
  const CombineMode mode{Weighting::kRow, /*reduce=*/true, /*adds_shared_expert=*/false};
  for (const Pattern pattern : {Pattern::kUniform, Pattern::kZipf}) {
    const Fixture<BFloat16> fixture(sizes, devices, TimeoutSeconds(), n_sms);
    Calls<BFloat16> calls(fixture, MakeAllIds(sizes, pattern, n_tokens, random), random,
                          {/*returns_rows=*/true});
    if (!calls.Dispatch(/*has_weights=*/true, "large")) return;
    if (!calls.Combine(mode, /*has_residual=*/false, /*has_scalars=*/false, "large")) return;
  }
  std::printf("large: R=%d T=%d, %d errors\n", n_ranks, n_tokens, n_errors);
}

// Ranks that stay away; afterwards a new group works.
void RunFail(int n_ranks, const std::vector<int>& devices) {
  for (const MissingOptions& options : kMissingOptions) {
    MissingRank(n_ranks, devices, options).Run();
  }
  std::mt19937 random(3);
  RunCase<float>(n_ranks, devices, 0, random);
  std::printf("fail: R=%d, %d errors\n", n_ranks, n_errors);
}

// Changed handles; afterwards a new group works.
void RunTamperedCases(int n_ranks, const std::vector<int>& devices, int limit_ms, int stride) {
  RunTampered(n_ranks, devices, limit_ms / 1e3, stride);
  std::mt19937 random(3);
  RunCase<float>(n_ranks, devices, 0, random);
  std::printf("tampered: then a case, %d errors\n", n_errors);
}

// Operands that change; afterwards a new group works.
void RunChangingCases(int n_ranks, const std::vector<int>& devices, int limit_ms, int n_rounds) {
  RunChanging(n_ranks, devices, limit_ms / 1e3, n_rounds);
  std::mt19937 random(3);
  RunCase<float>(n_ranks, devices, 0, random);
  std::printf("changing: then a case, %d errors\n", n_errors);
}

int RunProcesses(int n_ranks, const std::vector<int>& devices, int n_processes, int n_cases,
                 unsigned seed) {
  constexpr unsigned kLimitSeconds = 300;
  return Exchange::Fork(n_processes, kLimitSeconds, &exchange, [&] {
    RunCases(n_ranks, devices, n_cases, seed);
    RunFail(n_ranks, devices);
    MissingOptions options;
    options.exits = true;
    MissingRank(n_ranks, devices, options).Run();
    std::printf("processes: process %d of %d, %d errors\n", exchange.process(), n_processes,
                n_errors);
    return n_errors == 0 ? 0 : 1;
  });
}

int Main(int argc, char** argv) {
  const auto number = [&](int i, int otherwise) {
    return i < argc ? std::atoi(argv[i]) : otherwise;
  };
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a run that is killed has printed all its lines
  const std::string what = argc > 1 ? argv[1] : "";
  const int n_ranks = number(2, 2), n_devices = number(3, 1);
  const std::vector<int> devices = Spread(n_ranks, n_devices);
  if (what == "cases") {
    RunCases(n_ranks, devices, number(4, 50), number(5, 1), number(6, 0));
  } else if (what == "formats") {
    RunCases(n_ranks, devices, number(4, 50), number(5, 1), number(6, 0), /*quantizes=*/true);
  } else if (what == "large") {
    RunLarge(n_ranks, devices, number(4, 2048), number(5, 0));
  } else if (what == "replay") {
    Replay(n_ranks, devices).Run(number(4, 1000), number(5, 0));
  } else if (what == "fail") {
    RunFail(n_ranks, devices);
  } else if (what == "tampered") {
    RunTamperedCases(n_ranks, devices, number(4, 200), number(5, 1));
  } else if (what == "changing") {
    RunChangingCases(n_ranks, devices, number(4, 200), number(5, 10));
  } else if (what == "processes") {
    n_errors = RunProcesses(n_ranks, devices, number(4, 2), number(5, 20), number(6, 1));
  } else {
    std::fprintf(stderr,
                 "usage: p2p_test cases|formats|large|replay|fail|tampered|changing|processes "
                 "RANKS DEVICES [N...] [SEED] [SECONDS]\n");
    return 2;
  }
  std::fflush(stdout);
  return n_errors == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_ep::p2p

int main(int argc, char** argv) { return jax_ep::p2p::Main(argc, argv); }
