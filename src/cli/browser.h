// A page as a browser sees it, where Chromium is installed: how figures become files.
#ifndef WHET_CLI_BROWSER_H_
#define WHET_CLI_BROWSER_H_

#include <string>

namespace whet::cli {

// The document, as HTML, after the scripts of `page` ran under the address page.html#hash, in a headless
// Chromium without a network. std::runtime_error, saying what to do, if none is installed, and if it fails or
// takes longer than two minutes. A signal that ends this process ends the browser first.
std::string document_of(const std::string& page, const std::string& hash);

}  // namespace whet::cli

#endif  // WHET_CLI_BROWSER_H_
