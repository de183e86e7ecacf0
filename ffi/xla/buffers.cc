#include "xla/buffers.h"

#include <algorithm>
#include <string>

namespace jax_ep {

BufferList::BufferList(const ffi::RemainingArgs& operands) {
  Fill(operands, [&](size_t i) { return *operands.get<ffi::AnyBuffer>(i); });
}

BufferList::BufferList(const ffi::RemainingRets& results) {
  Fill(results, [&](size_t i) { return **results.get<ffi::AnyBuffer>(i); });
}

template <class Remaining, class Get>
void BufferList::Fill(const Remaining& remaining, const Get& get) {
  size_ = std::min(remaining.size(), kMaxSize);
  for (size_t i = 0; i < size_; ++i) buffers_[i].emplace(get(i));
}

BufferList BufferList::TakeLast(size_t n) {
  BufferList last;
  last.size_ = n;
  size_ -= n;
  for (size_t i = 0; i < n; ++i) last.buffers_[i] = buffers_[size_ + i];
  return last;
}

namespace {

struct Memory {
  uintptr_t begin = 0, end = 0;

  Memory() = default;
  explicit Memory(const ffi::AnyBuffer& buffer)
      : begin(reinterpret_cast<uintptr_t>(buffer.untyped_data())),
        end(begin + buffer.size_bytes()) {}

  // Never of an empty one.
  bool Overlaps(const Memory& other) const {
    return std::max(begin, other.begin) < std::min(end, other.end);
  }
};

Status Shared(const char* what, size_t index, size_t result) {
  return InvalidArgument("results must not share memory with other buffers of the call; got " +
                         std::string(what) + " " + std::to_string(index) +
                         " in the memory of result " + std::to_string(result));
}

}  // namespace

Status CheckDisjoint(const BufferList& operands, const BufferList& results) {
  std::array<Memory, BufferList::kMaxSize> read, written;
  for (size_t i = 0; i < operands.size(); ++i) read[i] = Memory(*operands.Find(i));
  for (size_t i = 0; i < results.size(); ++i) written[i] = Memory(*results.Find(i));
  for (size_t result = 0; result < results.size(); ++result) {
    for (size_t i = 0; i < operands.size(); ++i) {
      if (written[result].Overlaps(read[i])) return Shared("operand", i, result);
    }
    for (size_t i = result + 1; i < results.size(); ++i) {
      if (written[result].Overlaps(written[i])) return Shared("result", i, result);
    }
  }
  return {};
}

std::optional<RowType> ToRowType(ffi::DataType type) {
  if (type == ffi::BF16) return RowType::kBFloat16;
  if (type == ffi::F16) return RowType::kFloat16;
  if (type == ffi::F32) return RowType::kFloat32;
  return std::nullopt;
}

std::optional<RowType> ToSumType(ffi::DataType type) {
  return type == ffi::F16 ? std::nullopt : ToRowType(type);
}

ffi::DataType ToDataType(Element element, bool is_packed) {
  if (is_packed) return ffi::U8;
  switch (element) {
    case Element::kBFloat16:
      return ffi::BF16;
    case Element::kFloat16:
      return ffi::F16;
    case Element::kFloat32:
      return ffi::F32;
    case Element::kE4m3:
      return ffi::F8E4M3FN;
    case Element::kE2m1:
      return ffi::F4E2M1FN;
  }
  return ffi::DataType::INVALID;
}

ffi::DataType ToDataType(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return ffi::DataType::INVALID;
    case ScaleType::kFloat32:
      return ffi::F32;
    case ScaleType::kE8m0:
      return ffi::F8E8M0FNU;
    case ScaleType::kE4m3:
      return ffi::F8E4M3FN;
  }
  return ffi::DataType::INVALID;
}

const char* Name(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::DataType::F8E8M0FNU:
      return "float8_e8m0fnu";
    default:
      return "another dtype";
  }
}

int64_t BufferReader::Dim(size_t index, size_t axis) const {
  const ffi::AnyBuffer* const buffer = buffers_.Find(index);
  if (buffer == nullptr || axis >= buffer->dimensions().size()) return Shape::kAnySize;
  return buffer->dimensions()[axis];
}

ffi::DataType BufferReader::Type(size_t index) const {
  const ffi::AnyBuffer* const buffer = buffers_.Find(index);
  return buffer == nullptr ? ffi::DataType::INVALID : buffer->element_type();
}

void* BufferReader::Next(const char* name, ffi::DataType type, const Shape& shape) {
  const ffi::AnyBuffer* const buffer = buffers_.Find(next_++);
  if (buffer == nullptr) {
    Fail(name, "given", "nothing");
    return nullptr;
  }
  if (buffer->element_type() != type) Fail(name, Name(type), Name(buffer->element_type()));
  const auto dims = buffer->dimensions();
  if (!shape.Matches(dims.begin(), dims.size())) Fail(name, shape, *buffer);
  return buffer->untyped_data();
}

void BufferReader::ExpectEnd(const char* what) {
  if (next_ >= buffers_.size() || !status_.ok()) return;
  status_ = InvalidArgument("there must be " + std::to_string(next_) + " " + what + "; got " +
                            std::to_string(buffers_.size()));
}

void BufferReader::Fail(const char* name, const char* expected, const char* got) {
  if (!status_.ok()) return;
  status_ = InvalidArgument(std::string(name) + " must be " + expected + "; got " + got);
}

void BufferReader::Fail(const char* name, const Shape& shape, const ffi::AnyBuffer& buffer) {
  if (!status_.ok()) return;
  const auto dims = buffer.dimensions();
  status_ = InvalidArgument(std::string(name) + " must have the shape " +
                            ShapeText(shape.dims.data(), shape.rank) + "; got " +
                            ShapeText(dims.begin(), dims.size()));
}

}  // namespace jax_ep
