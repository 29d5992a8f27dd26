// Conversations, the draft and settings are kept until the tab is closed, where the browser allows it.

export const kept = {
  read(name) {
    try { return JSON.parse(sessionStorage.getItem(name)); } catch { return null; }
  },
  write(name, value) {
    try { sessionStorage.setItem(name, JSON.stringify(value)); } catch { /* full, or forbidden */ }
  },
};
