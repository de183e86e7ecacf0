#include "modules/nvshmem.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "nvshmem/world/rails.h"
#include "nvshmem/world/world.h"

namespace nb = nanobind;

namespace jax_ep::rail {
namespace {

void Raise(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

nb::bytes MakeId() {
  std::string id;
  Raise(World::Instance().MakeId(&id));
  return nb::bytes(id.data(), id.size());
}

// Runs a step that waits for other processes: meanwhile, other threads of Python may run.
template <class Step>
void RunStep(const Step& step) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = step();
  }
  Raise(status);
}

void Join(const nb::bytes& id, int pe, int n_pes, int device) {
  const std::string job(id.c_str(), id.size());
  RunStep([&] { return World::Instance().Join(job, pe, n_pes, device); });
}

size_t Allocate(size_t bytes) {
  size_t number = 0;
  RunStep([&] { return World::Instance().Allocate(bytes, &number); });
  return number;
}

void Open(const std::string& key, int64_t heap, int64_t node, const std::vector<int>& pes,
          int64_t message_bytes, int device, bool maps_peers) {
  const RailConfig config{node, pes, message_bytes, device, maps_peers};
  RunStep([&] { return Rails::Instance().Open(key, config, heap); });
}

std::tuple<std::string, int, bool> Room(int device) {
  GpuRoom room{};
  Raise(FindRoom(device, &room));
  return {room.uuid, room.n_sms, room.has_mps};
}

void DefineWorld(nb::module_& module) {
  module.attr("n_blocks") = kBlocks;  // of the exchange's kernels, all of which run at once
  module.def("room", &Room, nb::arg("device"),
             "A GPU's UUID, its multiprocessors, and whether processes run kernels on it at the "
             "same time, by MPS.");
  module.def(
      "load",
      [](const std::string& path) {
        Raise(World::Instance().Load(path));
        return World::Instance().version()->ToString();
      },
      nb::arg("path"), "Opens NVSHMEM's host library; returns its version.");
  module.def(
      "has_joined", [] { return World::Instance().has_joined(); },
      "Whether this process has joined the job.");
  module.def("make_id", &MakeId, "What all processes need to join; one of them makes it.");
  module.def("join", &Join, nb::arg("id"), nb::arg("pe"), nb::arg("n_pes"), nb::arg("device"),
             "Joins the job with the GPU `device`. Waits for all processes, without a limit.");
  module.def("allocate", &Allocate, nb::arg("bytes"),
             "Allocates a heap and returns its number. Waits for all processes, without a limit.");
}

void DefineOpenRails(nb::module_& module) {
  module.def(
      "share", [](const std::string& key) { return Rails::Instance().Share(key); }, nb::arg("key"),
      "Adds a user to an open rail. False: the rail is not open.");
  module.def("heap_bytes", &Rails::HeapBytes, nb::arg("n_nodes"), nb::arg("message_bytes"),
             "Bytes of the heap of a rail.");
  module.def(
      "pinned", [](const std::string& key) { return Rails::Instance().Pinned(key); },
      nb::arg("key"), "The heap that captured graphs of the key refer to, or -1.");
  module.def(
      "free", [](size_t bytes) { return Rails::Instance().Free(bytes); }, nb::arg("bytes"),
      "The heaps of so many bytes that nothing uses.");
  module.def("open", &Open, nb::arg("key"), nb::arg("heap"), nb::arg("node"), nb::arg("pes"),
             nb::arg("message_bytes"), nb::arg("device"), nb::arg("maps_peers") = true,
             "Sets up a rail between the processes `pes`, one per node. Without maps_peers, all "
             "puts go through NVSHMEM, also where loads and stores reach.");
  module.def(
      "close", [](const std::string& key) { return Rails::Instance().Close(key); }, nb::arg("key"),
      "Removes a user. True: it was the last one; then call drain and release.");
  module.def(
      "drain",
      [](const std::string& key, double limit_s) { return Rails::Instance().Drain(key, limit_s); },
      nb::arg("key"), nb::arg("limit_s"), nb::call_guard<nb::gil_scoped_release>(),
      "Waits until what this process has sent over the closed rail has arrived. False: it has not "
      "within the limit.");
  module.def(
      "release",
      [](const std::string& key, bool is_captured) { Rails::Instance().Release(key, is_captured); },
      nb::arg("key"), nb::arg("is_captured"),
      "Gives back the heap of a closed rail, which all processes have drained.");
}

}  // namespace

void DefineRails(nb::module_& module) {
  nb::module_ nvshmem = module.def_submodule("nvshmem", "NVSHMEM, and rails between nodes.");
  DefineWorld(nvshmem);
  DefineOpenRails(nvshmem);
}

}  // namespace jax_ep::rail
