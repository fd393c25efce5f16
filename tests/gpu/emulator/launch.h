// After the text of a kernel: one launch of it on every rank at once, ``args[rank]`` being the
// bytes of its argument.

template <class Argument>
static void call(void (*kernel)(Argument), const void* args) {
  kernel(*(const Argument*)args);
}
template <class Argument>
static u32 bytes_of(void (*)(Argument)) {
  return sizeof(Argument);
}
extern "C" u32 argument_bytes() { return bytes_of(ENTRY); }

extern "C" void emulate(const void* const* args, const u32* blocks, u32 nranks, u32 threads) {
  launch([](const void* block) { call(ENTRY, block); }, args, blocks, nranks, threads);
}
