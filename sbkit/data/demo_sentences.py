"""Texts of the demo corpus: small grammars for some languages, and lists of numbers for all others.

A grammar is a table of slots; ``expand`` picks one alternative of a slot and fills the slots named in it. Each grammar
yields more than 100,000 sentences over 90 to 150 words: too many to learn by heart, so a model has to recognise words.
No two words of a grammar sound the same, so that only one transcript fits a clip.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

Grammar = Mapping[str, Sequence[str]]


def _grammar(**slots: str) -> Grammar:
    return {name: tuple(part.strip() for part in text.split("|")) for name, text in slots.items()}


def _phrases(sentence: str, **slots: str) -> Grammar:
    """A grammar whose slots are whole phrases, so that any choice of them agrees."""
    return _grammar(sentence=sentence, **slots)


ENGLISH = _grammar(
    sentence=(
        "{person} {does} {thing}. | {person} {does} {thing} {where}. | {person} {does} {thing} {when}."
        "| {When} {person} {does} {thing}. | {When} {person} {does} {thing} {place}."
        "| {person} {does} {number} {things} {where}. | {thing} is {place}. | who {does} {thing} {where}?"
        "| where is {thing} {when}? | {person} {does} {number} {things} and {does} {thing}."
        "| {person} is {mood} because {person} {does} {thing}. | {person} {how} {does} {thing}."
        "| {When} {number} {things} are {place}. | is {person} {place} {when}?"
    ),
    person="{the} {mood} {human} | {the} {human} | {owner} {human}",
    thing="{the} {kind} {object} | {the} {object} | {owner} {object}",
    the="the | a | this | that | every",
    owner="my | her",
    mood="old | young | quiet | happy | tired | brave | clever | gentle | hungry | careful",
    human=(
        "farmer | teacher | doctor | sister | brother | driver | painter | captain | singer | baker"
        "| child | neighbor | queen | soldier | student | uncle"
    ),
    does=(
        "carries | finds | paints | follows | watches | opens | washes | hides | moves | brings"
        "| counts | drops | holds | repairs"
    ),
    kind="green | yellow | purple | heavy | broken | wooden | golden | empty | tiny | silver",
    object=(
        "basket | window | letter | table | bottle | jacket | lamp | candle | ticket | hammer | mirror"
        "| ladder | blanket | camera | bicycle | umbrella | suitcase | piano"
    ),
    number="three | five | seven | eleven | twenty | many",
    things="apples | horses | oranges | stones | chickens | pencils | {kind} {things}",
    where="{place} | {place} | {place} {when}",
    place="{near} the {site}",
    near="near | behind | under | beside | across | inside",
    site=(
        "river | church | bridge | market | garden | station | forest | kitchen | hospital | island"
        "| village | school"
    ),
    When="today | after dinner, | before breakfast, | in winter | on Monday | at night | sometimes",
    when="today | after dinner | before breakfast | in winter | on Monday | at night | again",
    how="slowly | quickly | always | never",
)

GERMAN = _phrases(
    "{who} {does} {what} {where}. | {when} {does} {who} {what}. | {when} {does} {who} {what} {where}."
    "| {does} {who} {what} {where}?",
    who=(
        "der alte Bauer | die junge Lehrerin | mein Bruder | meine Schwester | unser Nachbar"
        "| ein müder Fahrer | das kleine Kind | die kluge Ärztin | der mutige Kapitän"
        "| eine fröhliche Sängerin | der stille Maler | die fleißige Bäckerin | mein Onkel | die Königin"
    ),
    does=(
        "trägt | findet | sucht | öffnet | malt | wäscht | bringt | zählt | versteckt | repariert | holt"
        "| kauft"
    ),
    what=(
        "einen grünen Korb | den schweren Koffer | das offene Fenster | eine leere Flasche"
        "| den goldenen Spiegel | ein rotes Fahrrad | die warme Jacke | sieben frische Äpfel"
        "| drei weiße Hühner | den hölzernen Tisch | eine gelbe Lampe | den langen Brief | zwei dicke Bücher"
        "| die blaue Decke | einen neuen Schlüssel | den schwarzen Schirm"
    ),
    where=(
        "im Garten | am Fluss | hinter der Kirche | unter der Brücke | neben dem Markt | vor dem Bahnhof"
        "| im Wald | in der Küche | auf der Insel | im Krankenhaus | bei der Schule | im Dorf"
    ),
    when=(
        "heute | am Morgen | jeden Abend | im Winter | nach dem Essen | am Montag | vor dem Frühstück"
        "| manchmal | in der Nacht | wieder"
    ),
)

FRENCH = _phrases(
    "{who} {does} {what} {where}. | {when}, {who} {does} {what}. | {when}, {who} {does} {what} {where}."
    "| {where}, {who} {does} {what}.",
    who=(
        "le vieux fermier | la jeune maîtresse | mon frère | ma sœur | notre voisin | un chauffeur fatigué"
        "| le petit enfant | la reine | le brave capitaine | une chanteuse joyeuse | le peintre tranquille"
        "| la boulangère | mon oncle | le médecin"
    ),
    does=(
        "porte | trouve | cherche | ouvre | dessine | lave | apporte | compte | cache | répare | regarde"
        "| achète"
    ),
    what=(
        "un panier vert | la lourde valise | la grande fenêtre | une bouteille vide | le miroir doré"
        "| un vélo rouge | la veste chaude | sept pommes fraîches | trois poules blanches | la table en bois"
        "| une lampe jaune | la longue lettre | deux livres anciens | la couverture bleue"
        "| une nouvelle clé | le parapluie noir"
    ),
    where=(
        "dans le jardin | près de la rivière | derrière l'église | sous le pont | à côté du marché"
        "| devant la gare | dans la forêt | dans la cuisine | sur l'île | à l'hôpital | à l'école"
        "| au village"
    ),
    when=(
        "aujourd'hui | le matin | chaque soir | en hiver | après le repas | lundi | avant le déjeuner"
        "| parfois | pendant la nuit | encore"
    ),
)

SPANISH = _phrases(
    "{who} {does} {what} {where}. | {when} {who} {does} {what}. | {when} {who} {does} {what} {where}."
    "| ¿{who} {does} {what} {where}?",
    who=(
        "el viejo granjero | la joven maestra | mi hermano | mi hermana | nuestro vecino | un chófer cansado"
        "| el niño pequeño | la reina | el valiente capitán | una cantante alegre | el pintor tranquilo"
        "| la panadera | mi tío | el médico"
    ),
    does=(
        "lleva | encuentra | busca | abre | dibuja | lava | trae | cuenta | esconde | repara | mira | compra"
    ),
    what=(
        "una cesta verde | la maleta pesada | la ventana grande | una botella vacía | el espejo dorado"
        "| una bicicleta roja | la chaqueta caliente | siete manzanas frescas | tres gallinas blancas"
        "| la mesa de madera | una lámpara amarilla | esta carta larga | dos libros usados | la manta azul"
        "| una llave nueva | el paraguas negro"
    ),
    where=(
        "en el jardín | cerca del río | detrás de la iglesia | debajo del puente | al lado del mercado"
        "| delante de la estación | en el bosque | en la cocina | en la isla | en el hospital"
        "| en la escuela | en el pueblo"
    ),
    when=(
        "hoy | por la mañana | cada noche | en invierno | después de la cena | el lunes"
        "| antes del desayuno | a veces | esta tarde | otra vez"
    ),
)

ITALIAN = _phrases(
    "{who} {does} {what} {where}. | {when} {who} {does} {what}. | {when} {who} {does} {what} {where}."
    "| {who} {does} {what} {where}?",
    who=(
        "il vecchio contadino | la giovane maestra | mio fratello | mia sorella | il nostro vicino"
        "| un autista stanco | il bambino piccolo | la regina | il capitano coraggioso"
        "| una cantante allegra | il pittore tranquillo | la fornaia | mio zio | il medico"
    ),
    does=(
        "porta | trova | cerca | apre | disegna | lava | prende | conta | nasconde | ripara | guarda | compra"
    ),
    what=(
        "un cesto verde | la valigia pesante | la grande finestra | una bottiglia vuota | lo specchio dorato"
        "| una bicicletta rossa | la giacca calda | sette mele fresche | tre galline bianche"
        "| il tavolo di legno | una lampada gialla | questa lunga lettera | due libri usati"
        "| la coperta azzurra | una chiave nuova | l'ombrello nero"
    ),
    where=(
        "nel giardino | vicino al fiume | dietro la chiesa | sotto il ponte | accanto al mercato"
        "| davanti alla stazione | nel bosco | in cucina | sull'isola | all'ospedale | a scuola"
        "| nel villaggio"
    ),
    when=(
        "oggi | la mattina | ogni sera | in inverno | dopo la cena | lunedì | prima della colazione"
        "| qualche volta | durante la notte | di nuovo"
    ),
)

RUSSIAN = _phrases(
    "{who} {does} {what} {where}. | {when} {who} {does} {what}. | {when} {who} {does} {what} {where}."
    "| {does} {who} {what} {where}?",
    who=(
        "старый фермер | молодая учительница | мой брат | моя сестра | наш сосед | усталый водитель"
        "| маленький ребёнок | умный врач | смелый капитан | весёлая певица | тихий художник"
        "| добрая королева | мой дядя | высокий студент"
    ),
    does=(
        "несёт | находит | ищет | открывает | рисует | моет | приносит | считает | прячет | чинит | видит"
        "| покупает"
    ),
    what=(
        "зелёную корзину | тяжёлый чемодан | большое окно | пустую бутылку | золотое зеркало"
        "| красный велосипед | тёплую куртку | семь свежих яблок | три белых камня | деревянный стол"
        "| жёлтую лампу | длинное письмо | две старые книги | синее одеяло | новый ключ | чёрный зонт"
    ),
    where=(
        "в саду | у реки | за церковью | под мостом | около рынка | перед вокзалом | в лесу | на кухне"
        "| на острове | в больнице | в школе | в деревне"
    ),
    when=(
        "сегодня | утром | каждый вечер | зимой | после обеда | в понедельник | перед завтраком | иногда"
        "| ночью | опять"
    ),
)

ARABIC = _phrases(
    "{does} {who} {what} {where}. | {when} {does} {who} {what}. | {when} {does} {who} {what} {where}."
    "| هل {does} {who} {what} {where}؟",
    who=(
        "المزارع العجوز | المعلم الجديد | أخي الصغير | جارنا الطيب | السائق المتعب | الطبيب الذكي"
        "| القبطان الشجاع | الرسام الهادئ | الخباز النشيط | عمي الكبير | الطالب السعيد | الجندي الطويل"
    ),
    does="يحمل | يجد | يفتح | يرسم | يغسل | يحضر | يعد | يخفي | يصلح | يشتري | يرى | يبيع",
    what=(
        "السلة الخضراء | الحقيبة الثقيلة | النافذة الكبيرة | الزجاجة الفارغة | المرآة الذهبية"
        "| الدراجة الحمراء | المعطف الدافئ | سبع تفاحات | ثلاث دجاجات | الطاولة الخشبية | المصباح الأصفر"
        "| الرسالة الطويلة | الكتاب القديم | البطانية الزرقاء | المفتاح الفضي | المظلة السوداء"
    ),
    where=(
        "في الحديقة | قرب النهر | خلف المسجد | تحت الجسر | بجانب السوق | أمام المحطة | في الغابة"
        "| في المطبخ | على الجزيرة | في المستشفى | في المدرسة | في القرية"
    ),
    when=(
        "اليوم | في الصباح | كل مساء | في الشتاء | بعد العشاء | يوم الاثنين | قبل الفطور | أحيانا"
        "| في الليل | مرة أخرى"
    ),
)

HINDI = _phrases(
    "{who} {where} {what} {does}। | {when} {who} {what} {does}। | {when} {who} {where} {what} {does}।"
    "| क्या {who} {where} {what} {does}?",
    who=(
        "बूढ़ा किसान | नया शिक्षक | मेरा भाई | हमारा पड़ोसी | थका हुआ चालक | छोटा बच्चा | चतुर डॉक्टर"
        "| बहादुर कप्तान | शांत चित्रकार | अच्छा गायक | मेरा चाचा | ऊँचा सैनिक"
    ),
    does=(
        "उठाता है | ढूँढता है | खोलता है | बनाता है | धोता है | लाता है | गिनता है | छिपाता है"
        "| देखता है | खरीदता है | बेचता है | भूलता है"
    ),
    what=(
        "हरी टोकरी | भारी बक्सा | बड़ी खिड़की | खाली बोतल | सुनहरा शीशा | लाल साइकिल | गरम कोट | सात सेब"
        "| तीन मुर्गियाँ | लकड़ी की मेज़ | पीला दीपक | लंबी चिट्ठी | दो किताबें | नीला कंबल | पुरानी चाबी"
        "| काला छाता"
    ),
    where=(
        "बगीचे में | नदी के पास | मंदिर के पीछे | पुल के नीचे | बाज़ार में | स्टेशन के सामने | जंगल में"
        "| रसोई में | द्वीप पर | अस्पताल में | स्कूल में | गाँव में"
    ),
    when=(
        "आज | सुबह | हर शाम | सर्दी में | खाने के बाद | सोमवार को | नाश्ते से पहले | कभी कभी | रात को | फिर"
    ),
)

MANDARIN = _phrases(
    "{who}{where}{does}{what}。 | {when}{who}{does}{what}。 | {when}{who}{where}{does}{what}。"
    "| {who}{where}{does}{what}吗？",
    who=(
        "老农民 | 年轻的老师 | 我的哥哥 | 我的妹妹 | 我们的邻居 | 疲倦的司机 | 那个小孩 | 聪明的医生"
        "| 勇敢的船长 | 快乐的歌手 | 安静的画家 | 新来的学生"
    ),
    does="寻找 | 看见 | 带来 | 购买 | 清洗 | 修理 | 喜欢 | 忘记 | 收藏 | 检查",
    what=(
        "绿色的篮子 | 很重的箱子 | 一扇大窗户 | 空的瓶子 | 金色的镜子 | 红色的自行车 | 温暖的外套 | 七个苹果"
        "| 三只白鸡 | 木头桌子 | 黄色的灯 | 一封长信 | 两本旧书 | 蓝色的毯子 | 新的钥匙 | 黑色的雨伞"
    ),
    where=(
        "在花园里 | 在河边 | 在教堂后面 | 在桥下 | 在市场旁边 | 在车站前面 | 在森林里 | 在厨房里 | 在岛上"
        "| 在医院里 | 在学校里 | 在村子里"
    ),
    when="今天 | 每天早上 | 晚上 | 冬天 | 吃饭以后 | 星期一 | 早饭以前 | 有时候 | 夜里 | 现在",
)

SWAHILI = _phrases(
    "{who} {does} {what} {where}. | {when} {who} {does} {what}. | {when} {who} {does} {what} {where}."
    "| je, {who} {does} {what} {where}?",
    who=(
        "mkulima mzee | mwalimu mpya | kaka yangu | dada yangu | jirani yetu | dereva mchovu | mtoto mdogo"
        "| daktari mwerevu | nahodha jasiri | mwimbaji mzuri | mchoraji mtulivu | mwanafunzi mrefu"
    ),
    does=(
        "anabeba | anapata | anafungua | anachora | anaosha | analeta | anahesabu | anaficha | anaona"
        "| ananunua | anauza | anatafuta"
    ),
    what=(
        "kikapu cha kijani | sanduku zito | dirisha kubwa | chupa tupu | kioo cha dhahabu | baiskeli nyekundu"
        "| koti la joto | matofaa saba | kuku watatu | meza ya mbao | taa ya njano | barua ndefu"
        "| vitabu viwili | blanketi la bluu | ufunguo mkubwa | mwavuli mweusi"
    ),
    where=(
        "kwenye bustani | karibu na mto | nyuma ya kanisa | chini ya daraja | kando ya soko | mbele ya kituo"
        "| msituni | jikoni | kisiwani | hospitalini | shuleni | kijijini"
    ),
    when=(
        "leo | asubuhi | kila jioni | wakati wa baridi | baada ya chakula | siku ya jumatatu"
        "| kabla ya kifungua kinywa | mara kwa mara | usiku | tena"
    ),
)

# By espeak-ng's name of the language.
GRAMMARS: Mapping[str, Grammar] = {
    "ar": ARABIC, "cmn": MANDARIN, "de": GERMAN, "en": ENGLISH, "es": SPANISH, "fr": FRENCH, "hi": HINDI,
    "it": ITALIAN, "ru": RUSSIAN, "sw": SWAHILI,
}


def numbers_grammar(sayable: Sequence[int]) -> Grammar:
    """A grammar of number lists, for a language that has no sentences here.

    espeak-ng reads digits as number words of the language, and the transcript keeps the digits, so no knowledge of its
    script is needed. ``sayable`` are the numbers with a pronunciation of their own.
    """
    numbers = [f"{number}" for number in sayable]
    return {"sentence": tuple(", ".join(["{n}"] * count) + "." for count in (3, 4, 5)), "n": tuple(numbers)}


def expand(grammar: Grammar, rng: random.Random, slot: str = "sentence") -> str:
    """A random sentence of the grammar, with a capital letter, and ``an`` before vowels in English."""
    text = _fill(grammar, rng, slot)
    if grammar is ENGLISH:
        text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    first = next((i for i, char in enumerate(text) if char.isalnum()), 0)
    return text[:first] + text[first].upper() + text[first + 1:]


def _fill(grammar: Grammar, rng: random.Random, slot: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: _fill(grammar, rng, match.group(1)), rng.choice(grammar[slot]))


def words(grammar: Grammar) -> set[str]:
    """All words of the grammar in lower case; for Chinese, which has no spaces, all phrases."""
    texts = " ".join(text for alternatives in grammar.values() for text in alternatives)
    return set(re.findall(r"[^\s.,?¿؟।。？]+", re.sub(r"\{\w+\}", " ", texts).lower()))
