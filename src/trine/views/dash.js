// The page's own script: asks `/figures` for what is chosen and draws what comes back with plotly.js.
//
// Figures are not Dash components: taking one new figure in costs Dash as long as drawing it (its renderer walks through
// everything on the page), and a step of the slider changes four. Dash keeps the controls.
window.trine = (() => {
  const OTHERS = ['depth', 'gates', 'training'];
  const named = path => OTHERS.find(one => '/' + one === path.replace(/\/+$/, '')) || 'balance';
  // What is chosen; step is '' while the newest is followed.
  const chosen = {page: named(location.pathname), runs: null, step: '', layer: '', what: 'load', order: 'number',
    ranks: '0', expert: '', theme: document.documentElement.dataset.theme};
  const link = new URLSearchParams(location.search);  // as a link or a reload has it
  for (const name of ['step', 'layer']) { if (/^\d{1,15}$/.test(link.get(name))) { chosen[name] = link.get(name); } }
  // What is on the page.
  const shown = {version: '', fixed: '', keys: '', span: null, steps: [], known: '', layers: '', words: {}, cost: 0,
    busy: false, parts: new Map(), newest: '', silent: [], taken: 0, lost: false, answered: null};
  const CONFIG = {displayModeBar: false, displaylogo: false, responsive: true, scrollZoom: false};
  const FORMATS = ['png', 'svg', 'csv'];
  const byId = id => document.getElementById(id);
  const set = (id, props) => window.dash_clientside.set_props(id, props);
  const rest = () => new Promise(done => setTimeout(done, 0));

  function make(tag, name, text) {
    const one = document.createElement(tag);
    if (name) { one.className = name; }
    if (text !== undefined) { one.textContent = text; }
    return one;
  }

  // One call at a time; of those that come meanwhile only the last is made.
  function latest(work) {
    return async function run(...given) {
      if (run.busy) { run.next = given; return; }
      run.busy = true;
      try { await work(...given); } finally { run.busy = false; }
      if (run.next) { const again = run.next; run.next = null; await run(...again); }
    };
  }

  // -- asking --------------------------------------------------------------------------------------------------------

  function address(look) {
    const fixed = JSON.stringify([chosen.page, chosen.runs, chosen.layer, chosen.expert, chosen.theme]);
    const words = new URLSearchParams({page: chosen.page, theme: chosen.theme, known: shown.known});
    for (const name of ['step', 'layer', 'what', 'order', 'ranks', 'expert']) {
      if (chosen[name] !== '') { words.set(name, chosen[name]); }
    }
    if (chosen.runs) { words.set('runs', chosen.runs.join()); }
    else { for (const name of ['run', 'beside']) { if (link.has(name)) { words.set(name, link.get(name)); } } }
    if (shown.version) {
      words.set('seen', shown.version);
      words.set('have', [...shown.parts].map(([id, part]) => id + ':' + part.mark).join());
      if (fixed === shown.fixed) { words.set('moved', ''); }
    }
    if (look) { words.set('look', ''); }
    return [fixed, '/figures?' + words];
  }

  async function ask(from) {
    const found = await fetch(from);
    if (found.status === 204) { return null; }
    if (!found.ok) { throw new Error('status ' + found.status); }
    return found.json();
  }

  // The first answer is asked for before anything else has loaded.
  let first = ask(address(false)[1]);
  first.catch(() => {});

  const draw = latest(async look => {
    const begun = performance.now();
    const [fixed, from] = address(look);
    let answer;
    try {
      answer = await (first || ask(from));
    } catch (error) {
      shown.lost = true;
      tellLive();
      return;
    } finally {
      first = null;
    }
    Object.assign(shown, {lost: false, answered: new Date()});
    tellLive();
    if (answer) {
      shown.fixed = fixed;
      take(answer);
    }
    await paintAll();
    if (answer && look) { shown.cost = performance.now() - begun; }
  });

  // As often as trine dash --every says. Where all cores are busy, as beside training, an update is followed
  // by a pause of 50 times what it took; while nobody sees the page there is none.
  async function watch(every) {
    let last = performance.now();
    while (true) {
      await new Promise(done => setTimeout(done, every));
      const pause = shown.busy ? Math.min(50 * shown.cost, 20000) : 0;
      tellLive();
      if (document.hidden || draw.busy || performance.now() - last < pause) { continue; }
      await draw(Boolean(shown.version));
      last = performance.now();
    }
  }

  // -- taking an answer in -------------------------------------------------------------------------------------------

  // What stands at the top: whether the server answers, the newest step, and how long a run has been silent.
  function tellLive() {
    const one = byId('live');
    if (!one) { return; }
    one.classList.toggle('lost', Boolean(shown.lost));
    if (shown.lost) {
      const at = shown.answered, two = number => String(number).padStart(2, '0');
      words('live', 'connection lost, ' +
        (at ? 'last answer ' + two(at.getHours()) + ':' + two(at.getMinutes()) : 'is trine dash running?'));
      return;
    }
    const since = (performance.now() - shown.taken) / 1000;
    const quiet = shown.silent.map(([who, seconds]) => [who, seconds + since]).filter(([, seconds]) => seconds >= 60)
      .map(([who, seconds]) => ', last step ' + (who ? 'of ' + who + ' ' : '') + age(seconds) + ' ago');
    words('live', shown.newest + quiet.join(''));
  }

  function age(seconds) {
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
    return minutes < 60 ? minutes + ' min' : hours < 48 ? hours + ' h' : Math.floor(hours / 24) + ' days';
  }

  // Run, second run, step and layer stand in the address, so that a view can be linked and survives a reload.
  function writeAddress(named) {
    const found = new URLSearchParams();
    ['run', 'beside'].forEach((name, i) => { if (named[i] !== undefined) { found.set(name, named[i]); } });
    for (const name of ['step', 'layer']) { if (chosen[name] !== '') { found.set(name, chosen[name]); } }
    const text = String(found), to = location.pathname + (text ? '?' + text : '') + location.hash;
    if (to !== location.pathname + location.search + location.hash) { history.replaceState(history.state, '', to); }
  }

  function take(answer) {
    Object.assign(shown, {version: answer.version, busy: answer.busy, steps: answer.steps, newest: answer.newest,
      silent: answer.silent, taken: performance.now()});
    tellLive();
    if (chosen.runs) { writeAddress(answer.named); }
    words('heading', answer.heading);
    list('notes', answer.notes, () => answer.notes.map(one => make('p', '', one)));
    list('tiles', answer.tiles, () => tiles(answer.tiles));
    if (answer.tables) { list('tables', answer.tables, () => answer.tables.map(table)); }
    frames(answer.figures, answer.whole);
    for (const one of answer.figures.flat()) { change(shown.parts.get(one.id), one); }
    for (const part of shown.parts.values()) { mark(part); }
    controls(answer);
  }

  function controls(answer) {
    shown.known = answer.known;
    if (answer.runs) {
      set('run-a', {options: answer.runs});
      set('run-b', {options: answer.runs});
    }
    const named = JSON.stringify(answer.layers);
    if (named !== shown.layers) {
      shown.layers = named;
      const layers = answer.layers.map(([value, label]) => ({value, label}));
      const at = Number(chosen.layer);  // one that this page has not got stays chosen for those that have
      if (chosen.layer !== '' && !layers.some(one => one.value === at)) {
        layers.push({value: at, label: 'layer ' + at + ' (not here)'});
      }
      set('layer', {options: [{value: -1, label: 'all layers'}, ...layers]});
    }
    const [low, high] = answer.span;
    const at = chosen.step === '' ? high : Math.min(Math.max(Number(chosen.step), low), high);
    if (String(shown.span) !== String(answer.span)) {
      shown.span = answer.span;
      set('step', {min: low, max: high, ...(String(at) === chosen.step ? {} : {value: at})});
      stepText(at);
    } else if (chosen.step === '' && Number(byId('step').value) !== high) {
      set('step', {value: high});
    }
  }

  const stepText = step => words('step-text', 'step ' + step + ' of ' + shown.span[1]);

  function words(id, text) {
    const one = byId(id);
    if (one.textContent !== text) { one.textContent = text; }
  }

  function list(id, what, build) {
    const text = JSON.stringify(what);
    if (shown.words[id] !== text) {
      shown.words[id] = text;
      byId(id).replaceChildren(...build());
    }
  }

  function tiles(sides) {
    const found = sides.map(side => {
      const all = make('dl', 'tiles');
      for (const [what, value, beside, bad] of side.tiles) {
        const tile = make('div', bad ? 'tile bad' : 'tile');
        tile.append(make('dt', '', what), make('dd', 'value', value), make('dd', 'beside', beside));
        all.append(tile);
      }
      const one = make('div');
      one.append(...(side.who ? [make('p', 'who', side.who)] : []), all);
      return one;
    });
    const row = make('div', sides.length > 1 ? 'pairrow' : '');
    row.append(...found);
    return [row];
  }

  function table(one) {
    const section = make('section', 'alerts');
    section.append(make('h2', '', one.title));
    if (!one.rows.length) {
      section.append(make('p', '', one.none));
      return section;
    }
    const all = make('table', 'alertlist'), head = make('tr'), body = make('tbody'), top = make('thead');
    for (const name of one.columns) {
      const cell = make('th', '', name);
      cell.scope = 'col';
      head.append(cell);
    }
    for (const cells of one.rows) {
      const row = make('tr'), look = cells[cells.length - 1];
      cells.slice(0, -1).forEach((text, i) => {
        row.append(make('td', i === 0 ? 'number' : one.columns[i] === 'State' || one.columns[i] === 'Event' ? look : '',
          text));
      });
      body.append(row);
    }
    top.append(head);
    all.append(top, body);
    const box = make('div', 'tablebox');
    box.tabIndex = 0;
    box.setAttribute('role', 'region');
    box.setAttribute('aria-label', one.title);
    box.append(all);
    section.append(box);
    return section;
  }

  // -- figures -------------------------------------------------------------------------------------------------------

  // Elements for figures other than those on the page; whole is false for an answer about some of them.
  function frames(figures, whole) {
    const keys = JSON.stringify(figures.map(parts => parts.map(one => one.id)));
    if (!whole || keys === shown.keys) { return; }
    shown.keys = keys;
    for (const part of shown.parts.values()) { sight.unobserve(part.plot); window.Plotly && Plotly.purge(part.box); }
    shown.parts.clear();
    byId('figures').replaceChildren(...figures.map(parts => {
      const figure = make('figure', 'figure' + (parts.length > 1 ? ' pair' : parts[0].wide ? ' wide' : ''));
      const made = parts.map(one => frame(one, parts.length > 1 ? make('div') : figure));
      if (parts.length > 1) {
        const row = make('div', 'pairrow');
        row.append(...made);
        figure.append(row);
      }
      return figure;
    }));
  }

  function frame(one, into) {
    const part = {id: one.id, key: one.key, side: one.side, mark: '.', title: make('h2'), save: make('div', 'save'),
      plot: make('div', 'drawing'), box: make('div'), caption: make('figcaption'), cursor: make('div', 'cursor'),
      drawn: false};
    const head = make('div', 'figurehead');
    head.append(part.title, part.save);
    part.cursor.hidden = true;
    part.plot.append(part.box, part.cursor);
    into.append(head, ...(one.who ? [make('p', 'who', one.who)] : []), part.plot, part.caption);
    shown.parts.set(one.id, part);
    part.plot.trine = part;
    sight.observe(part.plot);
    return into;
  }

  function change(part, one) {
    if (!part) { return; }
    Object.assign(part, {mark: one.mark, over: one.over, cells: one.cells, query: one.query, height: one.height});
    part.plot.style.minHeight = one.height + 'px';
    if (part.title.textContent !== one.title) { part.title.textContent = one.title; }
    if (!one.query) { part.save.replaceChildren(); }
    else if (part.save.children.length !== FORMATS.length) {
      part.save.replaceChildren(...FORMATS.map(kind => make('a', '', kind.toUpperCase())));
    }
    [...part.save.children].forEach((link, i) => {
      link.href = '/export/' + one.key + '.' + FORMATS[i] + '?' + one.query;
      link.download = '';  // the server names the file
      link.setAttribute('aria-label', one.title + ' as ' + FORMATS[i].toUpperCase());
    });
    const said = JSON.stringify([one.notes, one.description]);
    if (part.said !== said) {
      part.said = said;
      part.caption.replaceChildren(...one.notes.map(note => make('p', '', note)),
        make('span', 'unseen', one.description));
    }
    if (one.plot) { part.wanted = one.plot; }
    if (one.picture !== undefined) { part.picture = one.picture; }
    if (one.plot || one.picture) { part.stale = true; }
    cells(part);
  }

  const near = part => {
    const at = part.plot.getBoundingClientRect();
    return at.bottom > -200 && at.top < innerHeight + 200;
  };
  const sight = new IntersectionObserver(
    seen => seen.forEach(one => { if (one.isIntersecting) { paint(one.target.trine); } }), {rootMargin: '200px'});

  // Figures in sight are drawn, in reading order; the others when they come into it.
  async function paintAll() {
    while (!window.Plotly) { await new Promise(done => setTimeout(done, 20)); }
    for (const part of [...shown.parts.values()]) {
      if (part.stale && near(part)) {
        paint(part);
        if (draw.next) { return; }  // another step was chosen already
        await rest();
      }
    }
  }

  function paint(part) {
    if (!part.stale || !window.Plotly || !part.box.isConnected) { return; }
    part.stale = false;
    const image = part.drawn && !part.wanted && part.box.querySelector('.imagelayer image');
    if (image) {  // the same axes and colours: only the pixels are others
      image.setAttribute('href', part.picture);
      part.box.data[0].source = part.picture;
      return;
    }
    if (part.wanted) { part.last = part.wanted; part.wanted = null; }
    if (part.picture) { part.last.data[0].source = part.picture; }
    Plotly.react(part.box, part.last.data, part.last.layout, CONFIG);
    if (!part.drawn) {
      part.drawn = true;
      part.box.on('plotly_afterplot', () => mark(part));
      if (part.key === 'layer') { part.box.on('plotly_click', event => pressedBar(event.points[0])); }
    }
    mark(part);
  }

  // The line at the step that is looked at, in figures over steps.
  function mark(part) {
    const full = part.box._fullLayout, at = shown.steps[part.side];
    const axis = full && full.xaxis, across = full && full.yaxis;
    // never beyond what is drawn, as where the recorder is further on than the losses
    const x = part.over && axis && at !== null ? axis.d2p(Math.min(Math.max(at, part.over[0]), part.over[1])) : -1;
    part.cursor.hidden = !(x >= 0 && x <= axis._length);
    if (!part.cursor.hidden) {
      Object.assign(part.cursor.style,
        {left: axis._offset + x + 'px', top: across._offset + 'px', height: across._length + 'px'});
    }
  }

  // -- cells of the picture of all experts ---------------------------------------------------------------------------

  function cells(part) {
    if (!part.cells || part.told) { return; }
    part.told = make('output', 'cell');
    part.told.hidden = true;
    part.plot.append(part.told);
    part.at = [0, 0];
    part.plot.tabIndex = 0;
    part.plot.setAttribute('role', 'application');
    part.plot.setAttribute('aria-label', 'Cells of the picture: arrow keys move, Enter chooses the layer and expert');
    const under = event => {
      const {xaxis, yaxis} = part.box._fullLayout || {}, box = part.box.getBoundingClientRect();
      if (!xaxis) { return null; }
      const x = Math.round(xaxis.p2d(event.clientX - box.left - xaxis._offset));
      const y = Math.round(yaxis.p2d(event.clientY - box.top - yaxis._offset)) - part.cells[2];
      return y >= 0 && y < part.cells[0] && x >= 0 && x < part.cells[1] ? [y, x] : null;
    };
    const hide = () => { part.told.hidden = true; };
    const point = event => {
      const at = under(event);
      if (at) { part.at = at; tell(part); } else { hide(); }
    };
    part.plot.addEventListener('pointermove', point);
    part.plot.addEventListener('pointerdown', point);
    part.plot.addEventListener('pointerleave', hide);
    part.plot.addEventListener('blur', hide);
    part.plot.addEventListener('click', event => {
      if (under(event)) { pressedCell(part); }  // a click's own place is a rounded one
    });
    part.plot.addEventListener('keydown', event => {
      const far = event.shiftKey ? 10 : 1;
      const by = {ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far]}[event.key];
      if (event.key === 'Escape') { hide(); }
      if (event.key === 'Enter') { pressedCell(part); }
      if (!by) { return; }
      event.preventDefault();
      part.at = part.at.map((one, i) => Math.min(Math.max(one + by[i], 0), part.cells[i] - 1));
      tell(part);
    });
  }

  const tell = latest(async part => {
    const [row, column] = part.at;
    const found = await fetch('/cell?' + part.query + '&row=' + row + '&column=' + column).catch(() => null);
    if (!found || !found.ok) { return; }
    const text = await found.text(), {xaxis, yaxis} = part.box._fullLayout;
    part.told.textContent = text;
    part.told.hidden = !text;
    const x = xaxis._offset + xaxis.d2p(column), y = yaxis._offset + yaxis.d2p(row + part.cells[2]);
    const left = Math.min(x + 12, part.plot.clientWidth - part.told.offsetWidth);
    Object.assign(part.told.style, {left: Math.max(left, 0) + 'px', top: y + 14 + 'px'});
  });

  function pressedCell(part) {
    const [row, column] = part.at, layer = row + part.cells[2];
    if (chosen.what !== 'saturation' && chosen.order === 'number') { chosen.expert = String(column); }
    if (chosen.layer === String(layer)) { draw(false); } else { set('layer', {value: layer}); }
  }

  function pressedBar(point) {
    const at = Math.round(point.x);
    if (chosen.layer === '') { set('layer', {value: at}); }
    else if (chosen.order === 'number') { chosen.expert = String(at); draw(false); }
  }

  // -- controls ------------------------------------------------------------------------------------------------------

  // Called by Dash with every change of a control; returns whether the newest step is followed.
  function choose(path, first, second, step, follow, layer, what, order, ranks, theme) {
    const before = JSON.stringify(chosen), none = window.dash_clientside.no_update;
    const triggered = window.dash_clientside.callback_context.triggered.map(one => one.prop_id);
    chosen.page = named(path || '/');
    document.querySelectorAll('#pages a').forEach(link => {
      if (named(link.pathname) !== chosen.page) { link.removeAttribute('aria-current'); }
      else { link.setAttribute('aria-current', 'page'); }
    });
    const runs = [first, second].filter(one => one !== null && one !== undefined);
    let followed = follow.includes('on');
    const most = shown.span ? shown.span[1] : Number(step), back = triggered.includes('step.value') && step < most;
    if (back) { followed = false; }
    const of = layer !== null && layer >= 0 ? String(layer) : '';
    Object.assign(chosen, {runs, layer: of, what, order, ranks: String(ranks), theme,
      step: followed ? '' : String(step)});
    if (followed && triggered.includes('follow.value') && Number(step) !== most) { set('step', {value: most}); }
    if (first !== null && (JSON.stringify(chosen) !== before || !shown.version)) { draw(false); }
    if (shown.span) { stepText(followed ? most : step); }
    return back && follow.length ? [] : none;
  }

  window.addEventListener('beforeprint', () => shown.parts.forEach(paint));
  window.dash_clientside = Object.assign({}, window.dash_clientside, {trine: {choose}});
  return {watch};
})();
