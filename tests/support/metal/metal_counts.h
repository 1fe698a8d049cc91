// Counts of the bytes that a kernel reads from each buffer.
//
// With COUNT_READS g++ calls a function of its thread sanitizer before each access to memory that is left after
// optimization. These are such functions, in place of the sanitizer's library.
#pragma once

namespace gpu {

constexpr size_t GUARD_BYTES = 64;
inline const char* error;
inline uint group_number;

// `read` counts the reads of every thread, and `distinct` a word once for each threadgroup that reads it.
struct Buffer {
  const char* begin;
  size_t bytes;
  uint64_t read, distinct;
  uint* last_group;  // of each word
};
inline Buffer counted[32];
inline uint buffers;

// Without calls of functions, whose accesses would be noted as well.
__attribute__((no_sanitize("thread"))) inline void note_read(const void* at, size_t bytes) {
  for (uint i = 0; i < buffers; ++i) {
    Buffer& buffer = counted[i];
    const size_t guarded = static_cast<const char*>(at) - buffer.begin + GUARD_BYTES;
    if (guarded >= buffer.bytes + 2 * GUARD_BYTES) continue;
    if (guarded < GUARD_BYTES || guarded + bytes > buffer.bytes + GUARD_BYTES) {
      error = "the kernel reads outside a buffer";
      return;
    }
    buffer.read += bytes;
    const size_t offset = guarded - GUARD_BYTES;
    for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
      if (buffer.last_group[word] == group_number) continue;
      buffer.last_group[word] = group_number;
      buffer.distinct += 4;
    }
    return;
  }
}

}  // namespace gpu

#ifdef COUNT_READS
#define HOOK extern "C" __attribute__((no_sanitize("thread"))) void
#define HOOKS(bytes)                                                                  \
  HOOK __tsan_read##bytes(void* at) { gpu::note_read(at, bytes); }                    \
  HOOK __tsan_unaligned_read##bytes(void* at) { gpu::note_read(at, bytes); }          \
  HOOK __tsan_write##bytes(void*) {}                                                  \
  HOOK __tsan_unaligned_write##bytes(void*) {}
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
HOOK __tsan_read_range(void* at, unsigned long bytes) { gpu::note_read(at, bytes); }
HOOK __tsan_write_range(void*, unsigned long) {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_init() {}
#undef HOOKS
#undef HOOK
#endif
