// The extension module jax_ep._ffi_cuda: handlers for jax.ffi, and the p2p groups of this process.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "cuda/handlers.h"
#include "cuda/registry.h"

namespace nb = nanobind;

namespace jax_ep::p2p {
namespace {

using PlaceTuple = std::tuple<int64_t, int64_t, int64_t>;  // ordinal, row, rank

nb::dict Targets() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("jax_ep_dispatch", CudaDispatch);
  add("jax_ep_dispatch_send", CudaDispatchSend);
  add("jax_ep_dispatch_receive", CudaDispatchReceive);
  add("jax_ep_combine", CudaCombine);
  add("jax_ep_combine_send", CudaCombineSend);
  add("jax_ep_combine_receive", CudaCombineReceive);
  return targets;
}

void OpenGroup(const std::string& key, int64_t n_ranks, int64_t n_experts, int64_t top_k,
               int64_t max_tokens_per_rank, int64_t row_bytes, int64_t n_sms, double timeout_s,
               const std::vector<PlaceTuple>& tuples) {
  std::vector<Place> places;
  for (const auto& [ordinal, row, rank] : tuples) places.push_back({ordinal, row, rank});
  const GroupConfig config{n_ranks,   n_experts, top_k, max_tokens_per_rank,
                           row_bytes, row_bytes, n_sms, timeout_s};
  const Status status = Registry::Instance().Open(key, config, places);
  if (!status.ok()) throw std::runtime_error(status.message);
}

Registry::Member FindMember(const std::string& key, int64_t ordinal) {
  Registry::Member member = Registry::Instance().Find(key, ordinal);
  if (member.group == nullptr) throw std::invalid_argument("group " + key + " is not open");
  return member;
}

NB_MODULE(_ffi_cuda, module) {
  module.doc() = "XLA FFI handlers of jax_ep for CUDA devices";
  module.def("targets", &Targets, "FFI targets: name -> handler.");
  module.def(
      "why_no_peer_access",
      [](const std::vector<int>& devices) { return CheckPeerAccess(devices).message; },
      nb::arg("devices"), "Which of the devices does not reach which other one, or ''.");
  module.def("open_group", &OpenGroup, nb::arg("key"), nb::arg("n_ranks"), nb::arg("n_experts"),
             nb::arg("top_k"), nb::arg("max_tokens_per_rank"), nb::arg("row_bytes"),
             nb::arg("n_sms"), nb::arg("timeout_s"), nb::arg("devices"),
             nb::call_guard<nb::gil_scoped_release>(),
             "Opens a group; devices are (ordinal, row, rank). row_bytes: of the longest row that "
             "travels, either way.");
  module.def(
      "close_group", [](const std::string& key) { Registry::Instance().Close(key); },
      nb::arg("key"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "dev_ptrs",
      [](const std::string& key, int64_t ordinal) {
        const Registry::Member member = FindMember(key, ordinal);
        return member.group->BufferAddresses(member.rank);
      },
      nb::arg("key"), nb::arg("ordinal"),
      "Addresses of a device's buffers: (dispatch, combine) x (send, recv, recv_count).");
  module.def(
      "failure",
      [](const std::string& key, int64_t ordinal) {
        const Registry::Member member = FindMember(key, ordinal);
        return member.group->CheckFailure(member.rank).message;
      },
      nb::arg("key"), nb::arg("ordinal"), "What a call of the device waited for in vain, or ''.");
}

}  // namespace
}  // namespace jax_ep::p2p
