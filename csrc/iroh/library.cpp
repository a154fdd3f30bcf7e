#include "iroh/library.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "iroh/abi.hpp"

namespace torch_iroh::iroh {
namespace {

struct Loaded {
  abi::Functions functions;
  std::string path;
  pid_t owner = 0;
};

std::atomic<const Loaded*> g_loaded{nullptr};

class Opener {
 public:
  Opener(const std::string& path, const std::string& version) : path_(path), version_(version) {}

  std::unique_ptr<Loaded> open() {
    handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      throw Error(ErrorKind::library, "cannot open the iroh library: " + std::string(dlerror()) +
                                          ". Try: pip install 'iroh>=1.2,<1.3', or set TORCH_IROH_LIBRARY");
    }
    std::uint32_t (*contract)() = nullptr;
    find("ffi_iroh_ffi_uniffi_contract_version", contract);
    if (contract() != abi::kContractVersion) {
      fail("its UniFFI contract version is " + std::to_string(contract()) + ", not " +
           std::to_string(abi::kContractVersion));
    }
    auto loaded = std::make_unique<Loaded>();
    auto& f = loaded->functions;
#define X(name, checksum, result, arguments) \
  find("uniffi_iroh_ffi_fn_" #name, f.name); \
  verify(#name, checksum);
    TORCH_IROH_ABI_FUNCTIONS(X)
#undef X
#define X(name)                                          \
  find("uniffi_iroh_ffi_fn_clone_" #name, f.name.clone); \
  find("uniffi_iroh_ffi_fn_free_" #name, f.name.free);
    TORCH_IROH_ABI_OBJECTS(X)
#undef X
#define X(name, type)                                                         \
  find("ffi_iroh_ffi_rust_future_poll_" #name, f.future_##name.poll);         \
  find("ffi_iroh_ffi_rust_future_cancel_" #name, f.future_##name.cancel);     \
  find("ffi_iroh_ffi_rust_future_complete_" #name, f.future_##name.complete); \
  find("ffi_iroh_ffi_rust_future_free_" #name, f.future_##name.free);
    TORCH_IROH_ABI_FUTURES(X)
#undef X
    find("ffi_iroh_ffi_rustbuffer_alloc", f.buffer_alloc);
    find("ffi_iroh_ffi_rustbuffer_free", f.buffer_free);
    loaded->path = path_;
    loaded->owner = getpid();
    return loaded;
  }

 private:
  [[noreturn]] void fail(const std::string& why) {
    throw Error(ErrorKind::library, "the iroh library at " + path_ +
                                        " (installed version: " + (version_.empty() ? "unknown" : version_) +
                                        ") does not fit: " + why + ". Supported: iroh " + abi::kSupportedVersions +
                                        ". Try: pip install 'iroh>=1.2,<1.3'");
  }

  template <typename F>
  void find(const char* symbol, F*& into) {
    into = reinterpret_cast<F*>(dlsym(handle_, symbol));
    if (into == nullptr) fail(std::string("symbol ") + symbol + " is missing");
  }

  void verify(const std::string& name, std::uint16_t expected) {
    std::uint16_t (*checksum)() = nullptr;
    find(("uniffi_iroh_ffi_checksum_" + name).c_str(), checksum);
    if (checksum() != expected) {
      fail("the checksum of " + name + " is " + std::to_string(checksum()) + ", not " + std::to_string(expected));
    }
  }

  std::string path_;
  std::string version_;
  void* handle_ = nullptr;
};

}  // namespace

void Library::open(const std::string& given, const std::string& installed_version) {
  const char* override_path = std::getenv("TORCH_IROH_LIBRARY");
  const bool overridden = override_path != nullptr && *override_path != '\0';
  const std::string path = overridden ? override_path : given;
  static auto* mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (const Loaded* loaded = g_loaded.load()) {
    abi::functions();  // refuses a forked child
    if (loaded->path != path) {
      throw Error(ErrorKind::library, "the iroh library is already open from " + loaded->path +
                                          "; this process cannot open another one from " + path);
    }
    return;
  }
  if (path.empty()) {
    throw Error(ErrorKind::library,
                std::string("the iroh package is not installed. torch-iroh needs iroh ") + abi::kSupportedVersions +
                    ". Try: pip install 'iroh>=1.2,<1.3', or set TORCH_IROH_LIBRARY to its shared library");
  }
  g_loaded.store(Opener(path, overridden ? "" : installed_version).open().release());
}

bool Library::is_open() noexcept {
  return g_loaded.load() != nullptr;
}

bool Library::inherited() noexcept {
  const Loaded* loaded = g_loaded.load();
  return loaded != nullptr && loaded->owner != getpid();
}

namespace abi {

const Functions* functions_or_null() noexcept {
  const Loaded* loaded = g_loaded.load();
  return loaded == nullptr || loaded->owner != getpid() ? nullptr : &loaded->functions;
}

const Functions& functions() {
  if (const Functions* f = functions_or_null()) return *f;
  if (Library::inherited()) {
    throw Error(ErrorKind::library,
                "iroh was started before this process was forked, and its threads stayed in the parent. Make the "
                "process group after the fork, or start processes with 'spawn'");
  }
  throw Error(ErrorKind::library, "the iroh library is not open yet");
}

}  // namespace abi
}  // namespace torch_iroh::iroh
