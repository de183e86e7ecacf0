// Makes allocations and the creation of threads fail, where the extension asks for them. Test code,
// loaded by failing.py; never part of the package.
//
// The extension calls `operator new` through a table of addresses, as every library calls another
// one's functions. Install() writes the addresses of the functions below into that table. So Python
// and jaxlib are not affected, and it does not matter which libraries are preloaded: those of
// sanitizers may be. libstdc++ allocates memory and creates threads on behalf of the extension, but
// also of others; its calls count if its caller is the extension.

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

#if defined(__x86_64__)
constexpr bool IsFunctionSlot(uint64_t type) {
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT;
}
#elif defined(__aarch64__)
constexpr bool IsFunctionSlot(uint64_t type) {
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT;
}
#else
#error "unknown relocations"
#endif

struct AddressRange {
  uintptr_t begin = 0, end = 0;

  bool Contains(uintptr_t address) const { return address >= begin && address < end; }
};

AddressRange extension, standard_library, self;

// Counts calls; fails the one of a number, and later ones if it `goes_on`.
struct Fault {
  std::atomic<int64_t> n_calls{0};
  std::atomic<int64_t> failing{0};  // 0: none
  std::atomic<bool> goes_on{false};

  bool Hits() {
    const int64_t call = ++n_calls;
    const int64_t first = failing;
    return first != 0 && (call == first || (goes_on && call > first));
  }

  void Set(int64_t first, bool and_later) {
    failing = 0;
    n_calls = 0;
    goes_on = and_later;
    failing = first;
  }
};

Fault allocations, threads;
std::atomic<bool> is_armed{false};  // unwinding is slow, and nothing counts before

struct Caller {
  bool is_extension = false;
};

// Passes over frames of this library and of libstdc++.
_Unwind_Reason_Code FindCaller(_Unwind_Context* context, void* data) {
  const uintptr_t address = _Unwind_GetIP(context);
  if (self.Contains(address) || standard_library.Contains(address)) return _URC_NO_REASON;
  static_cast<Caller*>(data)->is_extension = extension.Contains(address);
  return _URC_END_OF_STACK;
}

bool IsForExtension() {
  if (!is_armed) return false;
  Caller caller;
  _Unwind_Backtrace(FindCaller, &caller);
  return caller.is_extension;
}

bool AllocationFails(bool is_ours) { return is_ours && is_armed && allocations.Hits(); }

template <bool kChecksCaller>
void* New(size_t size) {
  if (AllocationFails(!kChecksCaller || IsForExtension())) throw std::bad_alloc();
  return ::operator new(size);
}

void* NewAligned(size_t size, std::align_val_t alignment) {
  if (AllocationFails(true)) throw std::bad_alloc();
  return ::operator new(size, alignment);
}

void* NewNoThrow(size_t size, const std::nothrow_t&) noexcept {
  return AllocationFails(true) ? nullptr : ::operator new(size, std::nothrow);
}

template <bool kChecksCaller>
int CreateThread(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                 void* argument) {
  const bool is_ours = !kChecksCaller || IsForExtension();
  if (is_ours && is_armed && threads.Hits()) return EAGAIN;
  return pthread_create(thread, attributes, run, argument);
}

template <class Function>
void* Address(Function* function) {
  return reinterpret_cast<void*>(function);
}

// The replacement of a function; null: none.
void* Replacement(const char* name, bool checks_caller) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("_Znwm") || is("_Znam")) return checks_caller ? Address(New<true>) : Address(New<false>);
  if (is("pthread_create")) {
    return checks_caller ? Address(CreateThread<true>) : Address(CreateThread<false>);
  }
  if (checks_caller) return nullptr;
  if (is("_ZnwmSt11align_val_t") || is("_ZnamSt11align_val_t")) return Address(NewAligned);
  if (is("_ZnwmRKSt9nothrow_t") || is("_ZnamRKSt9nothrow_t")) return Address(NewNoThrow);
  return nullptr;
}

// The dynamic section of a loaded library.
class Library {
 public:
  explicit Library(const dl_phdr_info& info) : base_(info.dlpi_addr) {
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
      for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(base_ + info.dlpi_phdr[i].p_vaddr);
           entry->d_tag != DT_NULL; ++entry) {
        Read(*entry);
      }
    }
  }

  int Patch(bool checks_caller) const {
    return Patch(plt_, plt_bytes_, checks_caller) + Patch(rela_, rela_bytes_, checks_caller);
  }

 private:
  void Read(const ElfW(Dyn) & entry) {
    // Some C libraries leave offsets here, others addresses.
    const uintptr_t given = entry.d_un.d_ptr, address = given < base_ ? base_ + given : given;
    if (entry.d_tag == DT_SYMTAB) symbols_ = reinterpret_cast<const ElfW(Sym)*>(address);
    if (entry.d_tag == DT_STRTAB) names_ = reinterpret_cast<const char*>(address);
    if (entry.d_tag == DT_JMPREL) plt_ = reinterpret_cast<const ElfW(Rela)*>(address);
    if (entry.d_tag == DT_PLTRELSZ) plt_bytes_ = entry.d_un.d_val;
    if (entry.d_tag == DT_RELA) rela_ = reinterpret_cast<const ElfW(Rela)*>(address);
    if (entry.d_tag == DT_RELASZ) rela_bytes_ = entry.d_un.d_val;
  }

  int Patch(const ElfW(Rela) * relocations, size_t n_bytes, bool checks_caller) const {
    int n_patched = 0;
    for (size_t i = 0; i < n_bytes / sizeof(ElfW(Rela)); ++i) {
      if (!IsFunctionSlot(ELF64_R_TYPE(relocations[i].r_info))) continue;
      const char* const name = names_ + symbols_[ELF64_R_SYM(relocations[i].r_info)].st_name;
      void* const replacement = Replacement(name, checks_caller);
      if (replacement == nullptr) continue;
      Write(reinterpret_cast<void**>(base_ + relocations[i].r_offset), replacement);
      ++n_patched;
    }
    return n_patched;
  }

  static void Write(void** slot, void* value) {
    const uintptr_t page = sysconf(_SC_PAGESIZE), address = reinterpret_cast<uintptr_t>(slot);
    void* const begin = reinterpret_cast<void*>(address & -page);
    if (mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) std::abort();
    *slot = value;
  }

  const uintptr_t base_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* names_ = nullptr;
  const ElfW(Rela) * plt_ = nullptr;
  const ElfW(Rela) * rela_ = nullptr;
  size_t plt_bytes_ = 0, rela_bytes_ = 0;
};

AddressRange RangeOf(const dl_phdr_info& info) {
  AddressRange range;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const auto& segment = info.dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t begin = info.dlpi_addr + segment.p_vaddr;
    if (range.end == 0) range.begin = begin;
    range.end = begin + segment.p_memsz;
  }
  return range;
}

int Visit(dl_phdr_info* info, size_t, void* n_patched) {
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  const char* const name = slash == nullptr ? info->dlpi_name : slash + 1;
  const AddressRange range = RangeOf(*info);
  if (range.Contains(reinterpret_cast<uintptr_t>(&Visit))) self = range;
  const bool is_extension = std::strncmp(name, "_ffi.", 5) == 0;
  const bool is_standard = std::strncmp(name, "libstdc++.so", 12) == 0;
  if (!is_extension && !is_standard) return 0;
  (is_extension ? extension : standard_library) = range;
  *static_cast<int*>(n_patched) += Library(*info).Patch(/*checks_caller=*/is_standard);
  return 0;
}

}  // namespace

extern "C" {

// Returns the number of addresses written. The extension must be loaded.
int FailingCallsInstall() {
  int n_patched = 0;
  dl_iterate_phdr(Visit, &n_patched);
  return extension.end == 0 ? 0 : n_patched;
}

// The `first` allocation from now on fails, counted from 1, and later ones if `and_later`.
void FailingCallsSetAllocations(int64_t first, int and_later) {
  allocations.Set(first, and_later != 0);
  is_armed = true;
}

// The `first` creation of a thread from now on fails, and later ones if `and_later`.
void FailingCallsSetThreads(int64_t first, int and_later) {
  threads.Set(first, and_later != 0);
  is_armed = true;
}

void FailingCallsStop() { is_armed = false; }

// Since the last Set.
int64_t FailingCallsCountAllocations() { return allocations.n_calls; }
int64_t FailingCallsCountThreads() { return threads.n_calls; }

}  // extern "C"
