// After the text of a kernel: one launch of it on every rank at once, ``args[rank]`` being the bytes of its argument.

template <class Argument> static void launch(void (*kernel)(Argument), const void* const* args, const u32* blocks, u32 nranks, u32 threads) {
  std::vector<std::thread> all;
  for (u32 r = 0; r < nranks; r++)
    for (u32 b = 0; b < blocks[r]; b++)
      all.emplace_back([=] { run_block(b, blocks[r], threads, [=] { kernel(*(const Argument*)args[r]); }); });
  for (std::thread& t : all) t.join();
}

template <class Argument> static u32 bytes_of(void (*)(Argument)) { return sizeof(Argument); }
extern "C" u32 argument_bytes() { return bytes_of(ENTRY); }

extern "C" void emulate(const void* const* args, const u32* blocks, u32 nranks, u32 threads) { launch(ENTRY, args, blocks, nranks, threads); }
