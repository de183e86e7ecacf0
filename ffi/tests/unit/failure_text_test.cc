// Tests of the errors of calls that have failed; run by host_test.

#include "p2p/open/failure_text.h"

#include <string>

#include "p2p/launch/call_args.h"
#include "tests/unit/check.h"
namespace jax_ep::p2p {
namespace {

// Two ranks, which are ranks 4 and 5 of all nodes'.
GroupConfig ConfigOf(double timeout_s) {
  GroupConfig config{};
  config.n_ranks = 2;
  config.timeout_s = timeout_s;
  config.first_rank = 4;
  return config;
}

std::string TextOf(double timeout_s, const Failure& failure) {
  return DescribeFailure(ConfigOf(timeout_s), /*rank=*/1, failure.ToWord()).message;
}

TEST(ACallWithoutFailureIsOk) { CHECK_EQ(DescribeFailure(ConfigOf(60), 1, /*word=*/0).ok(), true); }

TEST(AWaitNamesRanksTimeAndWhatDidNotArrive) {
  CHECK_EQ(TextOf(0.5, {Phase::kCounts, /*peer=*/0, /*epoch=*/7}),
           "rank 5 waited 0.5 s for rank 4 (dispatch: its counts, epoch 7). Has rank 4 stopped, or "
           "does it run a different program?");
  CHECK_CONTAINS(TextOf(60, {Phase::kDots, 0, 1}), "waited 60 s for");
  CHECK_CONTAINS(TextOf(0.1 + 0.2, {Phase::kDots, 0, 1}), "waited 0.3 s for");
  CHECK_CONTAINS(TextOf(1e9, {Phase::kDots, 0, UINT32_MAX}), "waited 1e+09 s for");
  CHECK_CONTAINS(TextOf(1e9, {Phase::kDots, 0, UINT32_MAX}), "epoch 4294967295)");
}

TEST(AWaitForAnotherGroupNamesTheRankOfTheSameIndex) {
  CHECK_CONTAINS(TextOf(60, {Phase::kPart, /*peer=*/3, /*epoch=*/9}),
                 "for rank 7 (between nodes: its rows, item 9)");
  CHECK_CONTAINS(TextOf(60, {Phase::kPartTaken, 0, 9}),
                 "for rank 1 (between nodes: that it takes earlier rows, item 9)");
}

TEST(EachWaitHasAText) {
  for (uint32_t phase = 1; phase <= static_cast<uint32_t>(Phase::kGradOffsets); ++phase) {
    const std::string text = TextOf(60, {static_cast<Phase>(phase), 0, 1});
    CHECK_EQ(text.find("unknown") == std::string::npos, true);
  }
  CHECK_CONTAINS(TextOf(60, {static_cast<Phase>(255), 0, 1}), "(unknown phase, ");
}

TEST(AChangedHandleNamesBothRanks) {
  const Failure failure{Phase::kGradOffsets, /*peer=*/1, /*epoch=*/3};
  const Status status = DescribeFailure(ConfigOf(60), /*rank=*/0, failure.ToWord());
  CHECK_EQ(status.code == Code::kInvalidArgument, true);
  CHECK_CONTAINS(status.message, "must be the unchanged result of a dispatch of this group; that");
  CHECK_CONTAINS(status.message,
                 "rank 4 was changed (the backward of combine: row_offsets on rank 5)");
}

TEST(OnlyWaitsInsideTheGroupAreForItsPeers) {
  CHECK_EQ(WaitsForPeer(Phase::kReturned), true);
  for (const Phase phase : {Phase::kNone, Phase::kWrongMesh, Phase::kPart, Phase::kPartTaken,
                            Phase::kChangedHandle, Phase::kGradHandle, Phase::kGradOffsets}) {
    CHECK_EQ(WaitsForPeer(phase), false);
  }
}

TEST(AnotherMeshIsAPrecondition) {
  const Failure failure{Phase::kWrongMesh, /*peer=*/5, /*epoch=*/1};
  const Status status = DescribeFailure(ConfigOf(60), /*rank=*/1, failure.ToWord());
  CHECK_EQ(status.code == Code::kFailedPrecondition, true);
  CHECK_CONTAINS(status.message, "the device of rank 1 is rank 1 of replica 2 in the function's");
}

}  // namespace
}  // namespace jax_ep::p2p
