// The p2p groups that are open in this process, by the key that stands in the attributes of calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/group.h"

namespace jax_ep::p2p {

// A device's place in a mesh. The ranks of a row are a group; a mesh has a row for every index
// along its other axes.
struct Place {
  int64_t ordinal;  // CUDA's
  int64_t row;
  int64_t rank;
};

class Registry {
 public:
  static Registry& Instance();

  // A key may be opened several times: equal groups are one.
  Status Open(const std::string& key, const GroupConfig& config, const std::vector<Place>& places);
  void Close(const std::string& key);

  // The group and rank of a device; null where there is none.
  struct Member {
    std::shared_ptr<Group> group;
    int rank = 0;
  };
  Member Find(std::string_view key, int64_t ordinal) const;

 private:
  struct Entry {
    std::map<int64_t, Member> members;  // by ordinal
    int64_t n_open = 0;
  };

  mutable std::mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace jax_ep::p2p
