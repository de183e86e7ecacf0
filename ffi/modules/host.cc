// The extension module jax_ep._ffi: handlers for jax.ffi on CPUs, and the groups of this process.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats.h"
#include "host/group.h"
#include "modules/dicts.h"

#ifdef JAX_EP_TESTING
#include "tests/failing_calls.h"
#endif

namespace nb = nanobind;

namespace jax_ep {
namespace {

// Strings and lists are converted in the functions, not in nanobind's casters: these end the
// process if memory runs out.
std::vector<host::Device> ToDevices(const nb::list& tuples) {
  std::vector<host::Device> devices;
  for (const nb::handle tuple : tuples) {
    const auto at = [&](size_t i) { return nb::cast<int64_t>(tuple[i]); };
    devices.push_back({at(0), {at(1), at(2)}});
  }
  return devices;
}

void OpenGroup(const char* key, int64_t n_ranks, int64_t n_ranks_per_node, int64_t n_source_nodes,
               int64_t n_groups, int64_t n_choices, int64_t hidden_size,
               int64_t max_tokens_per_rank, int64_t max_recv_tokens, int64_t row_alignment,
               int64_t token_bytes, double timeout_s, const char* late_hint,
               const nb::list& devices) {
  const GroupSizes sizes{n_ranks,     n_groups,        n_choices,     max_tokens_per_rank,
                         hidden_size, max_recv_tokens, n_source_nodes};
  const host::HostGroupConfig config{sizes,       n_ranks_per_node, row_alignment,
                                     token_bytes, timeout_s,        late_hint};
  const Status status = host::HostGroups::Instance().Open(key, config, ToDevices(devices));
  if (status.code == Code::kResourceExhausted) throw std::runtime_error(status.message);
  if (!status.ok()) throw std::invalid_argument(status.message);
}

std::shared_ptr<host::HostGroup> FindGroup(const char* key) {
  auto group = host::HostGroups::Instance().Find(key);
  if (group == nullptr) throw std::invalid_argument(std::string("group ") + key + " is not open");
  return group;
}

nb::str ToStr(std::string_view text) { return nb::str(text.data(), text.size()); }

nb::dict FormatDict(const TokenFormat& format) {
  nb::list layouts;
  nb::dict row_alignment;  // where it is not 1
  for (const ScalesLayout layout : format.layouts) {
    if (layout == ScalesLayout::kNone) continue;
    layouts.append(ToStr(Name(layout)));
    const int64_t n_rows = format.row_alignment(layout);
    if (n_rows != 1) row_alignment[ToStr(Name(layout))] = n_rows;
  }
  nb::dict dict;
  dict["name"] = ToStr(format.name);
  dict["block_size"] = format.block_size;
  dict["element"] = ToStr(Name(format.element));
  dict["element_bits"] = format.element_bits();
  dict["packed"] = format.is_packed;
  dict["scale_type"] = nb::none();
  if (!format.is_plain()) dict["scale_type"] = ToStr(Name(format.scale_type));
  dict["scale_bytes"] = format.scale_bytes();
  dict["takes_input_scale"] = format.takes_input_scale;
  dict["scales_layouts"] = layouts;
  dict["row_alignment"] = row_alignment;
  return dict;
}

// The table of token formats, a dict per format, with which Python compares its classes.
nb::list TokenFormatDicts() {
  nb::list dicts;
  for (const TokenFormat& format : kTokenFormats) dicts.append(FormatDict(format));
  return dicts;
}

NB_MODULE(_ffi, module) {
  module.doc() = "XLA FFI handlers of jax_ep for CPU devices";
  module.def("targets", &TargetDict, "FFI targets: name -> handler, or stage -> handler.");
  module.def("open_group", &OpenGroup, nb::arg("key"), nb::arg("n_ranks"),
             nb::arg("n_ranks_per_node"), nb::arg("n_source_nodes"), nb::arg("n_groups"),
             nb::arg("n_choices"), nb::arg("hidden_size"), nb::arg("max_tokens_per_rank"),
             nb::arg("max_recv_tokens"), nb::arg("row_alignment"), nb::arg("token_bytes"),
             nb::arg("timeout_s"), nb::arg("late_hint"), nb::arg("devices"),
             "Opens a group. token_bytes is the size of a token as it travels; late_hint ends the "
             "error of ranks that waited too long; devices are (ordinal, replica, rank).");
  module.def(
      "close_group", [](const char* key) { host::HostGroups::Instance().Close(key); },
      nb::arg("key"), "Undoes one open_group; the last one forgets the group.");
  module.def(
      "stats",
      [](const char* key, int64_t replica, int64_t rank) {
        return ToDict(FindGroup(key)->Stats({replica, rank}));
      },
      nb::arg("key"), nb::arg("replica"), nb::arg("rank"), "The totals of a rank.");
  module.def("token_formats", &TokenFormatDicts, "The table of token formats, a dict per format.");
#ifdef JAX_EP_TESTING
  module.def(
      "fail_next_call",
      [](const char* key, int64_t ordinal, const char* message) {
        host::FailingCalls::Instance().Add(key, ordinal, message);
      },
      nb::arg("key"), nb::arg("ordinal"), nb::arg("message"),
      "The next call of the group on the device ends with an error.");
#endif
}

}  // namespace
}  // namespace jax_ep
