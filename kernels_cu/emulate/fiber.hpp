// Stacks and the switch between them: hand-written for x86-64, ucontext elsewhere (and on x86-64 if
// CF_EMULATE_UCONTEXT asks for it, as a test).
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__) || defined(CF_EMULATE_UCONTEXT)
#define CF_HAS_UCONTEXT_FIBERS
#include <ucontext.h>

#include <memory>
#include <vector>
#endif

namespace cf::emulate {

inline constexpr size_t kStackBytes = 128 * 1024;
inline constexpr size_t kGuardBytes = 4096;

// One mapping for all stacks, a guard page below each; kept for the life of the process.
class Stacks {
 public:
  // Makes room for `count` stacks. Growing moves them, so no fiber may be alive.
  void reserve(size_t count) {
    if (count <= count_) return;
    if (base_ != nullptr) munmap(base_, count_ * kPitch);
    void* base = mmap(nullptr, count * kPitch, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = base == MAP_FAILED ? nullptr : static_cast<uint8_t*>(base);
    count_ = base_ == nullptr ? 0 : count;
    for (size_t i = 0; i < count_; ++i) mprotect(base_ + i * kPitch, kGuardBytes, PROT_NONE);
  }
  bool has(size_t count) const { return count <= count_; }
  uint8_t* top(size_t index) const { return base_ + (index + 1) * kPitch; }
  // Whether the address is in a guard page: a stack overflow.
  bool in_guard(const void* address) const {
    const auto* byte = static_cast<const uint8_t*>(address);
    if (byte < base_ || byte >= base_ + count_ * kPitch) return false;
    return static_cast<size_t>(byte - base_) % kPitch < kGuardBytes;
  }

 private:
  static constexpr size_t kPitch = kStackBytes + kGuardBytes;
  uint8_t* base_ = nullptr;
  size_t count_ = 0;
};

extern Stacks stacks;  // of this process

#if !defined(CF_HAS_UCONTEXT_FIBERS)

// Saves the callee-saved registers on the current stack, its pointer in *save, and continues at
// `load`.
extern "C" void cf_emulate_switch(void** save, void* load);

inline void switch_stack(void** save, void* load) { cf_emulate_switch(save, load); }
// A stack whose first switch enters `entry`, which must not return.
inline void* prepare_stack(uint8_t* top, void (*entry)()) {
  auto* slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // keeps the stack 16-byte aligned at entry
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  return slot;
}

#else

inline void switch_stack(void** save, void* load) {
  static std::vector<std::unique_ptr<ucontext_t>> saved;
  if (*save == nullptr) {
    saved.push_back(std::make_unique<ucontext_t>());
    *save = saved.back().get();
  }
  swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}
inline void* prepare_stack(uint8_t* top, void (*entry)()) {
  // The context lives at the top of the stack it describes.
  top -= (sizeof(ucontext_t) + 63) / 64 * 64;
  auto* context = reinterpret_cast<ucontext_t*>(top);
  getcontext(context);
  context->uc_stack.ss_sp = top - (kStackBytes - 8192);
  context->uc_stack.ss_size = kStackBytes - 8192;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

#endif

}  // namespace cf::emulate
